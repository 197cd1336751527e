"""What a capacity drops."""

from __future__ import annotations

import pytest

from moe_telemetry.capacity import CapacityDrops
from moe_telemetry.errors import ConfigError


def test_what_is_above_the_capacity_is_dropped() -> None:
    drops = CapacityDrops.of([5, 1, 1, 1], 2)
    assert drops.kept == (2, 1, 1, 1)
    assert drops.dropped == (3, 0, 0, 0)
    assert drops.total_dropped == 3
    assert drops.drop_ratio == 0.375


def test_a_load_of_nothing_has_no_drop_ratio() -> None:
    assert CapacityDrops.of([0, 0], 2).drop_ratio is None


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity=-1"):
        CapacityDrops.of([1], -1)

"""What the log says of a window's replay, at its limits."""

from __future__ import annotations

import pytest

import moe_telemetry as mt
from moe_telemetry.replay_totals import ReplayTotals
from moe_telemetry.route_verdict import complaint

CONFIG = mt.TelemetryConfig()


def _replay(checked: int, zero_overlap: int = 0, agreement: float = 1.0, replayed: int | None = None) -> ReplayTotals:
    return ReplayTotals(
        num_experts=128,
        top_k=8,
        replayed=checked if replayed is None else replayed,
        checked=checked,
        zero_overlap=zero_overlap,
        shared_experts=round(checked * 8 * agreement),
    )


def _verdict(*layers: ReplayTotals) -> str | None:
    return complaint({mt.RouterKey("decoder", layer): replay for layer, replay in enumerate(layers)}, CONFIG)


@pytest.mark.parametrize(
    ("replay", "is_reported"),
    [
        (_replay(100, 1), False),  # exactly 1 %
        (_replay(100, 2), True),
        (_replay(99, 50), False),  # too few to judge
        (_replay(100, 0, 0.9), False),  # exactly the limit
        (_replay(1000, 0, 0.899), True),
        (_replay(0, replayed=100), True),  # nothing could be checked
        (_replay(0, replayed=0), False),  # no token at all
    ],
)
def test_the_limits_are_these(replay: ReplayTotals, *, is_reported: bool) -> None:
    assert (_verdict(replay) is not None) == is_reported


def test_the_worst_layer_is_named_and_not_hidden_by_a_mean() -> None:
    healthy = [_replay(1000) for _ in range(47)]
    verdict = _verdict(*healthy, _replay(1000, 50))
    assert verdict is not None
    assert verdict.startswith("5.0% of the replayed tokens of decoder.47 share no expert")
    assert "1 of 48 layers above it" in verdict


def test_agreement_takes_over_where_zero_overlap_shows_nothing() -> None:
    verdict = _verdict(_replay(1000, 0, 0.99), _replay(1000, 0, 0.75))
    assert verdict is not None
    assert "routes of decoder.1 agree with the router's own choice by 75.0% only" in verdict


def test_without_a_replay_nothing_is_said() -> None:
    assert _verdict() is None

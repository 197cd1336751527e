"""From one reduction to the next: totals become windows, and both become a snapshot's layers."""

from __future__ import annotations

from collections.abc import Mapping

from moe_telemetry.identity import RouterKey
from moe_telemetry.packing import Reduced
from moe_telemetry.records import Counts, LayerSnapshot

__all__ = ["History"]


class History:
    """Remembers the totals of the last reduction, to tell what came after it."""

    def __init__(self, routers: Mapping[RouterKey, int]) -> None:
        self._routers = routers
        self._totals: Mapping[RouterKey, Mapping[str, Counts]] = {}
        self.layers: Mapping[RouterKey, LayerSnapshot] = {
            key: LayerSnapshot(num_experts=num_experts, total={}, window={}, share={})
            for key, num_experts in routers.items()
        }

    def advance(self, reduced: Reduced) -> None:
        """Take the totals of a new reduction: `layers` then holds them and the window before it."""
        self.layers = {key: self._layer(key, reduced) for key in self._routers}
        self._totals = reduced.totals

    def _layer(self, key: RouterKey, reduced: Reduced) -> LayerSnapshot:
        total = {stage: counts for stage, counts in reduced.totals[key].items() if not counts.is_empty}
        earlier = self._totals.get(key, {})
        windows = {stage: counts - earlier[stage] if stage in earlier else counts for stage, counts in total.items()}
        return LayerSnapshot(
            num_experts=self._routers[key],
            total=total,
            window={stage: counts for stage, counts in windows.items() if not counts.is_empty},
            share={stage: share for stage, share in reduced.shares[key].items() if stage in total},
        )

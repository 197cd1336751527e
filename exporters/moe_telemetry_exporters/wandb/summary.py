"""A run in a few numbers, for W&B's table of runs: how it ended, and the worst that was seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from moe_telemetry.snapshot import Snapshot
from moe_telemetry.summary import JobSummary

__all__ = ["WORST", "RunSummary"]

_PREFIX = "moe/summary"

WORST: Mapping[str, Callable[[float, float], float]] = {
    f"{_PREFIX}/highest_max_violation": max,
    f"{_PREFIX}/highest_replay_zero_overlap": max,
    f"{_PREFIX}/lowest_load_entropy": min,
    f"{_PREFIX}/lowest_replay_agreement": min,
}
"""Numbers that keep the worst of the whole run, and which of two is worse; all others are of the last window."""


class RunSummary:
    """Follows the snapshots of one run."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        """Go on from what a resumed run has in its summary."""
        self._worst = {key: float(known[key]) for key in WORST if isinstance(known.get(key), (int, float))}

    def of(self, snapshot: Snapshot) -> dict[str, float | str]:
        """Return what to put into the summary; a window in which nothing was counted changes nothing."""
        found = {**_load(snapshot), **_replay(snapshot)}
        for key, worse in WORST.items():
            if key in found:
                self._worst[key] = worse(float(found[key]), self._worst.get(key, float(found[key])))
        return {**found, **self._worst}


def _load(snapshot: Snapshot) -> dict[str, float | str]:
    window = JobSummary.of(snapshot)
    if (worst := window.worst_layer) is None:
        return {}
    (hottest,) = window.hottest_experts(1)
    return {
        f"{_PREFIX}/dead_experts": len(window.dead_experts),
        f"{_PREFIX}/highest_max_violation": worst.stats.max_violation,
        f"{_PREFIX}/hottest_expert": str(hottest.expert),
        f"{_PREFIX}/hottest_expert_share": hottest.share,
        f"{_PREFIX}/lowest_load_entropy": min(layer.stats.entropy for layer in window.layers),
        f"{_PREFIX}/tokens": JobSummary.of(snapshot, period="total", stage=window.stage).tokens,
        f"{_PREFIX}/worst_layer": str(worst.router),
    }


def _replay(snapshot: Snapshot) -> dict[str, float | str]:
    checks = [
        (layer, replay) for layer in snapshot.layers.values() if (replay := layer.replay) is not None and replay.checked
    ]
    if not checks:
        return {}
    # rows of all layers count alike: the agreement of the job is not the mean of its layers'
    shared, checked = math.fsum(replay.shared for _, replay in checks), sum(replay.checked for _, replay in checks)
    zero_overlaps = [
        max(layer.worst_rank_zero_overlap or 0.0, replay.zero_overlap_ratio or 0.0) for layer, replay in checks
    ]
    return {
        f"{_PREFIX}/highest_replay_zero_overlap": max(zero_overlaps),
        f"{_PREFIX}/lowest_replay_agreement": min(replay.agreement or 0.0 for _, replay in checks),
        f"{_PREFIX}/replay_agreement": shared / checked,
    }

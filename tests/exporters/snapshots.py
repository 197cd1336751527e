"""Snapshots of what goes wrong, for tests of exporters that say so."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from moe_telemetry import Snapshot
from moe_telemetry.records import Counts
from moe_telemetry.replay_totals import ReplayTotals


def misaligned(snapshot: Snapshot, layers: Collection[int] | None = None) -> Snapshot:
    """Return a snapshot in which half of the replayed tokens of some layers, or of all, share no expert."""
    changed = {
        key: replace(layer, window={stage: _misaligned(counts) for stage, counts in layer.window.items()})
        if layers is None or key.layer in layers
        else layer
        for key, layer in snapshot.layers.items()
    }
    return replace(snapshot, layers=changed)


def _misaligned(counts: Counts) -> Counts:
    replay = ReplayTotals(
        num_experts=len(counts.assignments),
        top_k=2,
        replayed=1000,
        checked=1000,
        zero_overlap=500,
        shared_experts=800,
        longest_equal_run=1,
    )
    return replace(counts, replay=replay)

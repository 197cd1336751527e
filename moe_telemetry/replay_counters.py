"""Device counters of the replay check, and the operator that adds one comparison to them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_telemetry.counters import NUM_SLOTS
from moe_telemetry.operators import define_operator, is_recompute
from moe_telemetry.replay_totals import REPLAY_SUMS

__all__ = ["count_comparison"]


def count_comparison(sums_FS: Tensor, peaks: Tensor, slot: Tensor, vector_C: Tensor) -> None:
    """Add one comparison; nothing is added while activation checkpointing recomputes.

    Args:
        sums_FS: int64 `[len(REPLAY_SUMS), NUM_SLOTS]`, added to in place.
        peaks: int64 `[P, NUM_SLOTS]`; its first row keeps the longest equal run.
        slot: int64 scalar on the same device, as for `counters.count_choices`.
        vector_C: int64 `[len(REPLAY_COUNTERS)]`, as `RouteComparison.vector` is.
    """
    _call(sums_FS, peaks, slot, vector_C)


def _compare(sums_FS: Tensor, peaks: Tensor, slot: Tensor, vector_C: Tensor) -> None:
    if is_recompute():
        return
    field_F = torch.arange(-1, len(REPLAY_SUMS) - 1, device=sums_FS.device)
    sums_FS.view(-1).scatter_add_(0, torch.add(slot, field_F, alpha=NUM_SLOTS), vector_C[:-1])
    peaks.view(-1).scatter_reduce_(0, (slot - NUM_SLOTS).view(1), vector_C[-1:], reduce="amax")


_call = define_operator("compare(Tensor(a!) sums_FS, Tensor(b!) peaks, Tensor slot, Tensor vector_C) -> ()", _compare)

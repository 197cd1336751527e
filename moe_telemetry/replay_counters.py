"""Device counters of the replay check, and the operator that adds one comparison to them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_telemetry.counters import NUM_SLOTS, is_recompute
from moe_telemetry.replay_totals import REPLAY_SUMS

__all__ = ["count_comparison"]

_library = torch.library.Library("moe_telemetry", "FRAGMENT")
_library.define("compare(Tensor(a!) sums_FS, Tensor(b!) peaks, Tensor slot, Tensor vector_C) -> ()")


def count_comparison(sums_FS: Tensor, peaks: Tensor, slot: Tensor, vector_C: Tensor) -> None:
    """Add one comparison; nothing is added while activation checkpointing recomputes.

    Args:
        sums_FS: int64 `[len(REPLAY_SUMS), NUM_SLOTS]`, added to in place.
        peaks: int64; its first entry keeps the longest equal run.
        slot: int64 scalar on the same device, as for `counters.count_choices`.
        vector_C: int64 `[len(REPLAY_COUNTERS)]`, as `RouteComparison.vector` is.
    """
    # seen by no tracer and no checkpoint policy, as `counters.count_choices` says
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001
    operator = torch.ops.moe_telemetry.compare if traced else _compare
    operator(sums_FS, peaks, slot, vector_C)


def _compare(sums_FS: Tensor, peaks: Tensor, slot: Tensor, vector_C: Tensor) -> None:
    if is_recompute():
        return
    field_F = torch.arange(-1, len(REPLAY_SUMS) - 1, device=sums_FS.device)
    sums_FS.view(-1).scatter_add_(0, torch.add(slot, field_F, alpha=NUM_SLOTS), vector_C[:-1])
    torch.maximum(peaks[:1], vector_C[-1:], out=peaks[:1])


def _compare_fake(sums_FS: Tensor, peaks: Tensor, slot: Tensor, vector_C: Tensor) -> None:
    """Say to a tracer that the operator returns nothing."""


_library.impl("compare", _compare, "CompositeExplicitAutograd")
torch.library.register_fake("moe_telemetry::compare", _compare_fake)

"""The load of single microbatches: what the window's total hides when their imbalances cancel out.

Letters: T tokens, K experts chosen per token (top-k), E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MICROBATCH_SCALE", "microbatch_load"]

MICROBATCH_SCALE = 2.0**24
"""Units per 1.0 of the first entry of `microbatch_load`."""


@torch.no_grad()
def microbatch_load(choices: Tensor, num_experts: int, valid: Tensor | None = None) -> Tensor:
    """Return int64 `[2]`: MaxVio of this call in fixed point, and 1; both 0 where nothing was assigned.

    Added up over calls and ranks, the first over the second is the mean of MaxVio over microbatches, as
    each rank's router sees them.

    Args:
        choices: integer expert ids `[T, K]`, those outside 0..E-1 not counted, or a bool routing map `[T, E]`.
        num_experts: E.
        valid: bool `[T]`, True for real tokens; None where all are real.
    """
    counts_E = (_count_map if choices.dtype == torch.bool else _count_ids)(choices, num_experts, valid)
    total = counts_E.sum()
    violation = counts_E.amax() * num_experts / total.clamp_min(1) - 1
    is_loaded = total > 0
    fixed = torch.where(is_loaded, violation * MICROBATCH_SCALE, 0.0).round()
    return torch.stack([fixed.to(torch.int64), is_loaded.to(torch.int64)])


def _count_map(map_TE: Tensor, _num_experts: int, valid: Tensor | None) -> Tensor:
    return (map_TE if valid is None else map_TE & valid.unsqueeze(1)).sum(0)


def _count_ids(ids_TK: Tensor, num_experts: int, valid: Tensor | None) -> Tensor:
    # one bin more takes what is not counted; int64 first: uint16 has no comparison on the CPU
    ids_TK = ids_TK.to(torch.int64)
    counted_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    if valid is not None:
        counted_TK &= valid.unsqueeze(1)
    bins = torch.where(counted_TK, ids_TK, num_experts).view(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[:-1]

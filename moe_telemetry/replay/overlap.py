"""Per row: how many experts two choices share, and whether one of them names an expert twice.

Two ways with equal results. Pairs: K * K comparisons of `[T]` vectors, where the CPU's vector units
win up to about 24 choices. Table: a scatter into `[T, E]` and a gather from it, few launches on an
accelerator and linear in K.

Letters: T tokens, K experts chosen per token (top-k), E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NarrowIds", "count_shared", "count_shared_by_pairs", "has_repeats", "narrow_ids"]

_PAIRS_UP_TO_K = 24
_UINT8_UP_TO_E = 2**8 - 2
_INT16_UP_TO_E = 2**15 - 2
_SIGNED = {torch.uint8: torch.int16, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


class NarrowIds(NamedTuple):
    """Expert ids of rows, in the form that is fast to compare."""

    ids_KT: Tensor
    """uint8, int16 or int32, contiguous: 0 where the id was negative, E + 1 where it was E or more, else id + 1."""
    num_experts: int

    @property
    def index_TK(self) -> Tensor:
        """int64 ids within 0..E-1; ids outside are clamped."""
        return (self.ids_KT.t().long() - 1).clamp_(0, self.num_experts - 1)

    @property
    def uses_pairs(self) -> bool:
        """Whether comparing pairs is the faster way here."""
        return self.ids_KT.device.type == "cpu" and len(self.ids_KT) <= _PAIRS_UP_TO_K


def narrow_ids(ids_TK: Tensor, num_experts: int) -> NarrowIds:
    """Return ids `[T, K]` of any integer dtype in narrow form; `ids_TK` is not written to."""
    # unsigned types first to a wider signed one: torch has hardly an operation for uint16 and wider
    signed_TK = ids_TK.to(_SIGNED.get(ids_TK.dtype, ids_TK.dtype))
    if torch.iinfo(signed_TK.dtype).max < num_experts:
        signed_TK = signed_TK.to(torch.int32)
    ids_KT = torch.empty(ids_TK.shape[::-1], dtype=_narrow_dtype(num_experts), device=ids_TK.device)
    # in uint8, -1 is 255, and one more is 0 again
    return NarrowIds(ids_KT.copy_(signed_TK.clamp(-1, num_experts).t()).add_(1), num_experts)


def _narrow_dtype(num_experts: int) -> torch.dtype:
    if num_experts <= _UINT8_UP_TO_E:
        return torch.uint8
    return torch.int16 if num_experts <= _INT16_UP_TO_E else torch.int32


def count_shared(chosen: NarrowIds, own: NarrowIds) -> Tensor:
    """Return int16 `[T]`: how many of `chosen` are among `own`, for rows whose ids are all in range."""
    if chosen.uses_pairs:
        return count_shared_by_pairs(chosen.ids_KT, own.ids_KT)
    return _count_shared_by_table(chosen, own)


def has_repeats(chosen: NarrowIds) -> Tensor:
    """Return bool `[T]`: whether an expert occurs twice, for rows whose ids are all in range."""
    return _has_repeats_by_pairs(chosen.ids_KT) if chosen.uses_pairs else _has_repeats_by_table(chosen)


def count_shared_by_pairs(chosen_KT: Tensor, own_KT: Tensor) -> Tensor:
    """Return int16 `[T]`: how many of `chosen_KT` are among `own_KT`, ids of one dtype, none negative."""
    # ids are not negative, so the exclusive or is 0 exactly where two are equal; unlike a comparison
    # it keeps the dtype, which is what lets the loop run at full vector width
    nearest_KT = chosen_KT ^ own_KT[0]
    scratch_KT = torch.empty_like(nearest_KT)
    for own_T in own_KT[1:]:
        torch.bitwise_xor(chosen_KT, own_T, out=scratch_KT)
        torch.minimum(nearest_KT, scratch_KT, out=nearest_KT)
    return (nearest_KT == 0).sum(0, dtype=torch.int16)


def _has_repeats_by_pairs(chosen_KT: Tensor) -> Tensor:
    nearest_T = torch.ones_like(chosen_KT[0])
    for k in range(1, len(chosen_KT)):
        nearest_T = torch.minimum(nearest_T, (chosen_KT[:k] ^ chosen_KT[k]).amin(0))
    return nearest_T == 0


def _count_shared_by_table(chosen: NarrowIds, own: NarrowIds) -> Tensor:
    index_TK = chosen.index_TK
    member_TE = torch.zeros(len(index_TK), chosen.num_experts + 2, dtype=torch.int8, device=index_TK.device)
    # the table keeps a column for ids below and above the range, so that none of them is folded into an expert
    member_TE.scatter_(1, own.ids_KT.t().long(), 1)
    return member_TE.gather(1, index_TK + 1).sum(1, dtype=torch.int16)


def _has_repeats_by_table(chosen: NarrowIds) -> Tensor:
    index_TK = chosen.index_TK
    place_TK = torch.arange(index_TK.shape[1], dtype=torch.int16, device=index_TK.device).expand_as(index_TK)
    # an expert named twice keeps one of its two places, whichever was written last
    table_TE = torch.empty(len(index_TK), chosen.num_experts, dtype=torch.int16, device=index_TK.device)
    table_TE.scatter_(1, index_TK, place_TK)
    return (table_TE.gather(1, index_TK) != place_TK).any(1)

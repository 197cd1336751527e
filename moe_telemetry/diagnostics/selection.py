"""What a router's choice says against its probabilities: mass, margin, and overlap with the score's own.

Letters: T tokens, K experts chosen per token (top-k), E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_telemetry.errors import ConfigError, MaskError

__all__ = ["Selection", "check_call", "read_selection"]

_EPS = torch.finfo(torch.float32).eps


class Selection(NamedTuple):
    """Values of each token's choice, `[T]` each."""

    mass_T: Tensor
    margin_T: Tensor
    """Of no meaning without `has_margin`."""
    overlap_T: Tensor
    """Of no meaning without `has_overlap`."""
    known_T: Tensor
    """False where an id is out of range, or a routing map has another number of choices than K."""
    has_margin: bool
    """False where every expert is chosen: there is no boundary then."""
    has_overlap: bool

    @property
    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three values in the order of the fields."""
        return self.mass_T, self.margin_T, self.overlap_T


def check_call(scores: Tensor, choices: Tensor, valid: Tensor | None, top_k: int | None) -> int:
    """Check the shapes of a router call and return its K.

    Raises:
        ConfigError: scores and choices do not fit each other, K is not known, or E < 2.
        MaskError: the mask has another shape.
    """
    if scores.ndim != 2 or scores.shape[1] < 2 or not scores.is_floating_point():
        raise ConfigError(
            f"scores are {scores.dtype} of shape {list(scores.shape)}; expected floats [T, E] with two experts or more"
        )
    num_tokens, num_experts = scores.shape
    is_map = choices.dtype == torch.bool
    if choices.ndim != 2 or choices.shape[0] != num_tokens or not _fits(choices.shape[1], num_experts, is_map=is_map):
        expected = f"[{num_tokens}, {num_experts}]" if is_map else f"[{num_tokens}, K] with K of 1 to {num_experts}"
        raise ConfigError(
            f"{'routing map' if is_map else 'expert ids'} of shape {list(choices.shape)} with scores of shape "
            f"{list(scores.shape)}; expected {expected}"
        )
    if valid is not None and valid.shape != (num_tokens,):
        raise MaskError(f"mask of shape {list(valid.shape)} with scores {list(scores.shape)}; expected [{num_tokens}]")
    if is_map and (top_k is None or not 1 <= top_k <= num_experts):
        raise ConfigError(f"top_k={top_k} with a routing map; expected 1 to {num_experts}, a map does not tell it")
    return top_k if is_map and top_k is not None else choices.shape[1]


def _fits(num_columns: int, num_experts: int, *, is_map: bool) -> bool:
    return num_columns == num_experts if is_map else 1 <= num_columns <= num_experts


def read_selection(probabilities_TE: Tensor, choices: Tensor, top_k: int, *, is_biased: bool) -> Selection:
    """Return what the choices of a call say; overwrites `probabilities_TE`."""
    num_experts = probabilities_TE.shape[1]
    top = probabilities_TE.topk(min(top_k + 1, num_experts)).values if is_biased else None
    is_map = choices.dtype == torch.bool
    chosen, known_T = (_of_map if is_map else _of_ids)(probabilities_TE, choices, top_k)
    mass_T = (chosen.clamp_min(0) if is_map else chosen).sum(1)
    if top is None:
        # -1 stands for "not chosen" in a map's row, and for "chosen" in what is left over
        floor_T = (torch.where(choices, chosen, 2.0) if is_map else chosen).amin(1)
        overlap_T, ceiling_T = mass_T, probabilities_TE.amax(1)
    else:
        floor_T, ceiling_T = top[:, top_k - 1], top[:, -1]
        # by value: of two experts that tie at the boundary the score alone prefers neither
        overlap_T = (chosen >= floor_T.unsqueeze(1)).sum(1, dtype=torch.float32) / top_k
    margin_T = (floor_T - ceiling_T).clamp_min_(0).div_(floor_T.clamp_min(_EPS))
    has_margin = top_k < num_experts
    return Selection(mass_T, margin_T, overlap_T, known_T, has_margin, has_overlap=is_biased)


def _of_ids(probabilities_TE: Tensor, expert_ids: Tensor, _top_k: int) -> tuple[Tensor, Tensor]:
    """Return the chosen probabilities `[T, K]`, and which rows are known; leaves -1 where they were."""
    # int64 first: uint16 has no clamp on the CPU
    ids_TK = expert_ids.to(torch.int64)
    in_range_TK = ids_TK.clamp(0, probabilities_TE.shape[1] - 1)
    chosen_TK = probabilities_TE.gather(1, in_range_TK)
    probabilities_TE.scatter_(1, in_range_TK, -1.0)
    return chosen_TK, (in_range_TK == ids_TK).all(1)


def _of_map(probabilities_TE: Tensor, map_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the chosen probabilities `[T, E]`, -1 elsewhere, and which rows are known; leaves -1 where they were."""
    chosen_TE = torch.where(map_TE, probabilities_TE, -1.0)
    probabilities_TE.masked_fill_(map_TE, -1.0)
    return chosen_TE, map_TE.sum(1) == top_k

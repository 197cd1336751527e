"""Sums of a router call's score statistics, to be added to counters that cross ranks.

Each token's values are rounded to fixed point before they are added, so the sums of any split of the
tokens (microbatches, ranks) add up to the same integers as those of the whole. Nothing here waits for
the device.

    tally = score_tally(scores, expert_ids, kind="logits")
    sums.add_(tally.sums)

Letters: T tokens, K experts chosen per token (top-k), E experts, F fields, of which
M mean fields and C counts of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_telemetry.diagnostics.distribution import Distribution, ScoreFunction, ScoreKind, read_scores
from moe_telemetry.diagnostics.selection import Selection, check_call, read_selection
from moe_telemetry.score_statistics import NOTHING, NUM_SUM_FIELDS

__all__ = ["ScoreTally", "bias_maxima", "score_tally"]

_FINE = 2.0**24
_SQUARE_ROOT_OF_Z_SCALE = 2.0**-4
# A token adds at most 2**36 units, so that 2**27 of them fit into 63 bits: means are kept to +-4096 and
# z to 2**20 (logits of about 1000), beyond anything that trains. The largest logit shows what is cut.
_LIMIT = 2.0**12
_MAXIMUM_LIMIT = 2.0**37
_BITS_OF_ONE = 0x3F800000
# Elements of scores per block and thread: larger temporaries come fresh from the operating system on each
# call, which costs more than the work on them. The sums do not depend on it.
_CPU_BLOCK = 2**16


class ScoreTally(NamedTuple):
    """What one router call adds to its counters."""

    sums: Tensor
    """int64 `[F + E]`, to be added: the entries of `sum_fields(E)`."""
    maxima: Tensor
    """int64 `[1]`, to be kept by maximum: the first of `MAX_FIELDS`; `bias_maxima` gives the others."""


@torch.no_grad()
def score_tally(
    scores: Tensor,
    choices: Tensor,
    *,
    kind: ScoreKind = "auto",
    function: ScoreFunction = "softmax",
    valid: Tensor | None = None,
    top_k: int | None = None,
    is_biased: bool = False,
) -> ScoreTally:
    """Return the sums and maxima of one router call.

    A row whose scores are not all finite is counted as such and is in no sum. A row with an id outside
    0..E-1 takes no part in selected mass, margin and overlap: what was chosen is not known.

    Args:
        scores: float `[T, E]`, never written to.
        choices: integer expert ids `[T, K]` of any dtype, or a bool routing map `[T, E]`.
        kind: what the scores are. `auto` tells probabilities from logits row by row on the device, for
            half as much again; where an adapter knows, it should say.
        function: the router's score function.
        valid: bool `[T]`, True for real tokens; None where all are real.
        top_k: K, needed with a routing map.
        is_biased: whether a bias or a group limit, too, decides the choice. Then the margin is that of
            the choice by score alone, and the overlap of both choices is measured, by a top-k of its own.

    Raises:
        ConfigError: shapes do not fit, or E < 2 (a `ValueError`).
        MaskError: the mask has another shape (a `ValueError`).
    """
    top_k = check_call(scores, choices, valid, top_k)
    if scores.device.type == "cpu" and scores.numel() > (block := _CPU_BLOCK * torch.get_num_threads()):
        num_rows = max(1, block // scores.shape[1])
        masks = [None] * -(-len(scores) // num_rows) if valid is None else valid.split(num_rows)
        calls = zip(scores.split(num_rows), choices.split(num_rows), masks, strict=True)
        return _add_up([_tally(part, ids, kind, function, mask, top_k, is_biased) for part, ids, mask in calls])
    return _tally(scores, choices, kind, function, valid, top_k, is_biased)


def _tally(
    scores: Tensor,
    choices: Tensor,
    kind: ScoreKind,
    function: ScoreFunction,
    valid: Tensor | None,
    top_k: int,
    is_biased: bool,  # noqa: FBT001  # the caller's keyword, handed on
) -> ScoreTally:
    if len(scores) == 0:
        return _empty(scores.shape[1], scores.device)
    rows = read_scores(scores, kind, function)
    z_T = _scaled_square(rows)
    # a comparison with infinity is one operation less than isfinite, and as false for a NaN
    counted_T = (rows.mean_T + rows.negative_entropy_T + z_T).abs_() < torch.inf
    nan_T = torch.isnan(rows.top_T)
    if valid is None:
        valid = torch.ones_like(counted_T)
    else:
        counted_T, nan_T = counted_T & valid, nan_T & valid
    logits_T = _logit_rows(rows, counted_T)
    bits_E = _probability_bits(rows.probabilities_TE, counted_T)
    selection = read_selection(rows.probabilities_TE, choices, top_k, is_biased=is_biased)
    values = [rows.mean_T, rows.negative_entropy_T, z_T, *selection.values]
    masks = [counted_T, counted_T, logits_T, *_selection_rows(selection, counted_T), nan_T, valid]
    return ScoreTally(_sums(values, masks, bits_E), _largest(rows.top_T, logits_T))


def bias_maxima(bias: Tensor) -> Tensor:
    """Return int64 `[3]`, the last of `MAX_FIELDS`, of a router's bias; for once a reduction, not a call.

    Args:
        bias: float `[E]`, the same on every rank. An entry that is not finite makes its fields absent.
    """
    bias_E = bias.detach().float()
    values = torch.stack([bias_E.amax(), bias_E.amin().neg(), bias_E.std(correction=0)])
    return _as_maxima(torch.where(torch.isfinite(values), values, -torch.inf))


def _scaled_square(rows: Distribution) -> Tensor:
    """Return the squared log-sum-exp in the unit of the other values, 0 where there are no logits."""
    if rows.log_sum_T is None:
        return torch.zeros_like(rows.negative_entropy_T)
    return (rows.log_sum_T * _SQUARE_ROOT_OF_Z_SCALE).square()


def _logit_rows(rows: Distribution, counted_T: Tensor) -> Tensor:
    if rows.log_sum_T is None:
        return torch.zeros_like(counted_T)
    return counted_T if rows.are_logits_T is None else counted_T & rows.are_logits_T


def _probability_bits(probabilities_TE: Tensor, counted_T: Tensor) -> Tensor:
    """Return int64 `[E]`: over counted rows, the sums of the bits of 1 + p.

    Between 1 and 2 float32 is a grid of 2**-23: the addition rounds p to it, the bits less those of 1
    count its units, and their sum is exact. Rows are masked as bits, for NaN times 0 is NaN.
    """
    bits_TE = probabilities_TE.add(1).view(torch.int32)
    return bits_TE.mul_(counted_T.to(torch.int32).unsqueeze(1)).sum(0)


def _selection_rows(selection: Selection, counted_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which rows are in selected mass, margin and overlap."""
    known_T = counted_T & selection.known_T
    nothing_T = torch.zeros_like(known_T)
    return (
        known_T,
        known_T if selection.has_margin else nothing_T,
        known_T if selection.has_overlap else nothing_T,
    )


def _sums(values: list[Tensor], masks: list[Tensor], bits_E: Tensor) -> Tensor:
    values_MT = torch.stack(values).clamp_(-_LIMIT, _LIMIT).mul_(_FINE).round_()
    masks_CT = torch.stack(masks)
    totals_M = torch.where(masks_CT[: len(values)], values_MT, 0.0).sum(1, dtype=torch.int64)
    counts_C = masks_CT.sum(1)
    experts_E = torch.sub(bits_E, counts_C[0], alpha=_BITS_OF_ONE)
    return torch.cat([totals_M, counts_C, experts_E])


def _largest(top_T: Tensor, logits_T: Tensor) -> Tensor:
    return _as_maxima(torch.where(logits_T, top_T, -torch.inf).amax().unsqueeze(0))


def _as_maxima(values: Tensor) -> Tensor:
    """Return fixed point that sorts as the values do, NOTHING for minus infinity."""
    return values.clamp(NOTHING / _FINE, _MAXIMUM_LIMIT).mul_(_FINE).to(torch.int64)


def _add_up(tallies: list[ScoreTally]) -> ScoreTally:
    sums = torch.stack([tally.sums for tally in tallies]).sum(0)
    return ScoreTally(sums, torch.stack([tally.maxima for tally in tallies]).amax(0))


def _empty(num_experts: int, device: torch.device) -> ScoreTally:
    sums = torch.zeros(NUM_SUM_FIELDS + num_experts, dtype=torch.int64, device=device)
    return ScoreTally(sums, torch.full((1,), NOTHING, dtype=torch.int64, device=device))

"""The operator that adds a router call's score statistics to its counters, in steps that are sampled.

It runs about fifty small operations on the device, so it is skipped in steps whose statistics no
reduction will show. The switch is a plain Python value that the operator looks up when it runs:
compiled code obeys it without being compiled again. A graph that is being captured always takes its
scores, for nothing but the device is asked when it is replayed.

Letters: F rows of a router's score counters, E experts, S stage slots.
"""

from __future__ import annotations

import itertools
import logging
import weakref

import torch
from torch import Tensor

from moe_telemetry.counters import NUM_SLOTS
from moe_telemetry.diagnostics import bias_maxima, microbatch_load, score_tally
from moe_telemetry.masks import fit_mask
from moe_telemetry.operators import define_operator, is_recompute
from moe_telemetry.routers import RouterSite
from moe_telemetry.score_statistics import MAX_FIELDS, MICROBATCH_FIELDS, NUM_SUM_FIELDS

__all__ = ["NUM_SCORE_ROWS", "Sampling", "count_scores", "note_bias"]

NUM_SCORE_ROWS = NUM_SUM_FIELDS + len(MICROBATCH_FIELDS)
"""Rows of a router's score counters beside the E of its experts."""

_handles = itertools.count()
_samplings: weakref.WeakValueDictionary[int, Sampling] = weakref.WeakValueDictionary()
_reported: set[str] = set()
_logger = logging.getLogger("moe_telemetry")


class Sampling:
    """Whether calls are sampled now: one switch for all routers of a monitor."""

    def __init__(self) -> None:
        self.is_on = True
        self.handle = next(_handles)
        """What stands for the switch in a traced graph, the same number for every router."""
        _samplings[self.handle] = self


def count_scores(
    sums_FS: Tensor,
    peaks: Tensor,
    slot: Tensor,
    scores: Tensor | None,
    choices: Tensor,
    valid: Tensor | None,
    *,
    sampling: Sampling,
    site: RouterSite,
    strict: bool,
) -> None:
    """Add one router call to its score counters, where calls are sampled and nothing is recomputed.

    Args:
        sums_FS: int64 `[NUM_SUM_FIELDS + E + len(MICROBATCH_FIELDS), S]`, added to in place.
        peaks: int64 `[P, S]`, the last rows of it `MAX_FIELDS`; kept by maximum.
        slot: int64 scalar on the same device, `slot_value` of the stage.
        scores: float `[..., E]`; None where the router's call does not show them.
        choices: integer expert ids `[..., K]`, or a bool routing map `[..., E]`.
        valid: True for real tokens, `[B, S]` or `[T]`; None where all are real.
        sampling: the switch.
        site: the router, which knows what its scores are.
        strict: whether a mask that does not fit raises `MaskError`, or is reported and not used.
    """
    what = site.score_kind, site.score_function, site.is_biased
    _call(sums_FS, peaks, slot, scores, choices, valid, sampling.handle, site.top_k or 0, strict, *what)


def note_bias(peaks: Tensor, site: RouterSite) -> None:
    """Keep the largest and smallest value and the spread of a router's expert bias, if it has one."""
    bias = site.expert_bias()
    if bias is not None:
        # the bias is of no stage: it stands in the column of each
        peaks[1 - len(MAX_FIELDS) :] = bias_maxima(bias).to(peaks.device).unsqueeze(1)


def _score(
    sums_FS: Tensor,
    peaks: Tensor,
    slot: Tensor,
    scores: Tensor | None,
    choices: Tensor,
    valid: Tensor | None,
    sampling: int,
    top_k: int,
    strict: bool,  # noqa: FBT001  # an operator's arguments are positional
    kind: str,
    function: str,
    is_biased: bool,  # noqa: FBT001
) -> None:
    if is_recompute() or not _is_sampled(sampling, choices.device):
        return
    num_experts = sums_FS.shape[0] - NUM_SCORE_ROWS
    rows = choices.detach().reshape(-1, choices.shape[-1])
    valid_T = None if valid is None else fit_mask(valid, rows.shape[0], strict=strict)
    load = microbatch_load(rows, num_experts, valid_T)
    scores_TE = _fit_scores(scores, rows, num_experts)
    if scores_TE is None:
        _add_rows(sums_FS, slot, load, sums_FS.shape[0] - len(load))
        return
    tally = score_tally(
        scores_TE,
        rows,
        kind=kind,  # type: ignore[arg-type]  # an operator knows texts, not literals
        function=function,  # type: ignore[arg-type]
        valid=valid_T,
        top_k=top_k or None,
        is_biased=is_biased,
    )
    _add_rows(sums_FS, slot, torch.cat([tally.sums, load]), 0)
    logit_row = peaks.shape[0] - len(MAX_FIELDS)
    largest = (slot + NUM_SLOTS * (logit_row - 1)).view(1)
    peaks.view(-1).scatter_reduce_(0, largest, tally.maxima, reduce="amax")


def _is_sampled(sampling: int, device: torch.device) -> bool:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    switch = _samplings.get(sampling)
    return switch is not None and switch.is_on


def _fit_scores(scores: Tensor | None, rows: Tensor, num_experts: int) -> Tensor | None:
    """Return the scores as `[T, E]`, or None where there are none for these choices."""
    if scores is None or num_experts < 2:
        return None
    num_choices = rows.shape[1] if rows.dtype != torch.bool else 1
    if scores.shape[-1] == num_experts and scores.numel() == len(rows) * num_experts and num_choices <= num_experts:
        return scores.detach().reshape(-1, num_experts)
    message = f"scores with {scores.shape[-1]} columns do not fit choices with {rows.shape[1]} among {num_experts}"
    if message not in _reported:
        _reported.add(message)
        _logger.warning("moe_telemetry: %s experts, or have other rows; they are in no score statistic", message)
    return None


def _add_rows(sums_FS: Tensor, slot: Tensor, added: Tensor, first: int) -> None:
    """Add to consecutive rows in the column of the slot, whose scalar holds its place in row 1."""
    row = torch.arange(first - 1, first - 1 + len(added), device=sums_FS.device)
    sums_FS.view(-1).scatter_add_(0, torch.add(slot, row, alpha=NUM_SLOTS), added)


_call = define_operator(
    "score(Tensor(a!) sums_FS, Tensor(b!) peaks, Tensor slot, Tensor? scores, Tensor choices, Tensor? valid, "
    "int sampling, int top_k, bool strict, str kind, str function, bool is_biased) -> ()",
    _score,
)

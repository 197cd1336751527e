"""Why a replay is misaligned: the one cause that restores agreement, or that none does.

    locate_misalignment(replayed, own, num_experts=128).advice

Letters: T rows (tokens), L layers, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_telemetry.errors import MaskError, RoutesError
from moe_telemetry.replay import hypotheses, remap
from moe_telemetry.replay.advice import (
    advise,
    advise_aligned,
    advise_nothing_checked,
    advise_stale,
    advise_unexplained,
)
from moe_telemetry.replay.classes import RowClass, check_ids
from moe_telemetry.replay.evidence import Cause, Evidence, Trial
from moe_telemetry.replay.geometry import Geometry
from moe_telemetry.replay.order import SequenceStarts
from moe_telemetry.replay.stale import Stale, find_stale_rows

__all__ = ["Misalignment", "locate_misalignment"]

_GOOD = 0.75
"""Agreement corrected for chance from which rows pass as aligned when nothing explains them better."""
_RESTORED = 0.5
"""Agreement corrected for chance that a cause must restore to be named."""
_DEVIATIONS = 3.0
"""Standard errors by which a cause must beat the rows as given."""
_NOTHING_TO_FIT = 0.9
"""Agreement corrected for chance from which causes that need fitting are not tried."""
_SIMPLER_BY = 1.02
"""A later hypothesis must restore more than an earlier one by this factor: simple causes come first."""


@dataclass(frozen=True, kw_only=True)
class Misalignment:
    """How replayed routes relate to the router's own."""

    cause: Cause
    offset: int = 0
    """Rows (token_shift) or layers (layer_shift); positive where the replayed rows come late."""
    agreement: float | None
    """As given, over the sampled rows; None where no row could be compared."""
    restored_agreement: float | None = None
    """With the cause undone; None where there is nothing to undo, or nothing that helps."""
    chance_agreement: float | None = None
    """Of unrelated rows, by how popular each expert is in these routes."""
    advice: str
    """A sentence to act on."""

    @property
    def aligned(self) -> bool:
        """True where the routes belong to their tokens."""
        return self.cause == "aligned"


def locate_misalignment(
    replayed: Tensor,
    own: Tensor,
    *,
    num_experts: int,
    valid: Tensor | None = None,
    sequence_starts: SequenceStarts | None = None,
    row_stride: int = 1,
    batch_size: int | None = None,
    context_parallel_size: int | None = None,
    context_parallel_rank: int | None = None,
) -> Misalignment:
    """Say which cause, undone, makes the replayed routes agree with the router's own.

    `replayed` and `own` are `[T, K]` of one router, or `[T, L, K]` of all routers, which is what a
    layer shift can be seen in; any integer dtype. `valid` is bool `[T]`, True on real tokens. The
    sequences are told by `sequence_starts` (bool `[T]` or row numbers), by `batch_size` (batch-first,
    one length) or by `row_stride` (sequence-first, that many sequences). With `context_parallel_rank`
    the rows are that rank's slices; without it, whole sequences.

    It reads the tensors back to the host and takes a fraction of a second: not for the hot path.

    Raises:
        RoutesError: shapes, dtypes or numbers do not fit; the message gives them.
        MaskError: `valid` does not fit.
    """
    replayed_TLK, own_TLK = _stacked(replayed, num_experts, "replayed"), _stacked(own, num_experts, "own")
    if replayed_TLK.shape != own_TLK.shape:
        raise RoutesError(f"replayed has shape {tuple(replayed.shape)}, own {tuple(own.shape)}; expected equal shapes")
    geometry = Geometry.of(len(own_TLK), sequence_starts=sequence_starts, row_stride=row_stride, batch_size=batch_size)
    evidence = Evidence.gather(replayed_TLK, own_TLK, _mask(valid, len(own_TLK)), num_experts, geometry)
    trials = _trials(evidence, batch_size, context_parallel_size, context_parallel_rank)
    return _judge(evidence, trials)


def _stacked(ids: Tensor, num_experts: int, name: str) -> Tensor:
    if ids.ndim not in {2, 3}:
        raise RoutesError(f"{name}: shape {tuple(ids.shape)}; expected [T, K] of one router or [T, L, K] of all")
    check_ids(ids.flatten(0, -2), num_experts, name)
    if ids.numel() == 0:
        raise RoutesError(f"{name}: shape {tuple(ids.shape)} has no rows")
    ids = ids.detach().to("cpu", torch.int64)
    return ids[:, None] if ids.ndim == 2 else ids


def _mask(valid: Tensor | None, num_rows: int) -> Tensor:
    if valid is None:
        return torch.ones(num_rows, dtype=torch.bool)
    if valid.shape != (num_rows,) or valid.dtype != torch.bool:
        raise MaskError(f"valid has shape {tuple(valid.shape)}, {valid.dtype}; expected ({num_rows},), torch.bool")
    return valid.cpu()


def _trials(evidence: Evidence, batch_size: int | None, cp_size: int | None, cp_rank: int | None) -> Iterator[Trial]:
    """Try the causes, simple ones first; those that fit something to the rows only where rows disagree."""
    yield from remap.dtype_wraps(evidence)
    if len(evidence.rows_n):
        yield from hypotheses.token_shifts(evidence)
        yield from hypotheses.layer_shifts(evidence)
        yield from hypotheses.batch_sequence_swaps(evidence, batch_size)
        yield from hypotheses.context_parallel_orders(evidence, cp_size, cp_rank)
        if _corrected(evidence.agreement, evidence.chance()) >= _NOTHING_TO_FIT:
            return
        yield from hypotheses.sequence_swaps(evidence)
    yield from remap.expert_remaps(evidence)


def _corrected(agreement: float, chance: float) -> float:
    """Return agreement on a scale where 1 is perfect and 0 is chance; 0 where chance is perfect."""
    return (agreement - chance) / (1 - chance) if chance < 1 else 0.0


def _judge(evidence: Evidence, trials: Iterator[Trial]) -> Misalignment:
    num_rows = len(evidence.rows_n)
    agreement, chance = (evidence.agreement, evidence.chance()) if num_rows else (None, 0.0)
    best: Trial | None = None
    best_merit = 0.0
    for trial in trials:
        given = agreement if trial.given is None else trial.given
        corrected = _corrected(trial.score.agreement, chance if trial.chance is None else trial.chance)
        merit = corrected * min(trial.score.rows / max(num_rows, 1), 1.0)
        if merit > best_merit * _SIMPLER_BY and _explains(trial, corrected, _corrected(given or 0.0, chance), num_rows):
            best, best_merit = trial, merit
    if best is None:
        return _judge_as_given(evidence, agreement, chance)
    given = agreement if best.given is None else best.given
    return Misalignment(
        cause=best.cause,
        offset=best.offset,
        agreement=given,
        restored_agreement=best.score.agreement,
        chance_agreement=chance if best.chance is None else best.chance,
        advice=advise(best.cause, best.offset, given, best.score.agreement),
    )


def _explains(trial: Trial, corrected: float, given: float, num_rows: int) -> bool:
    """Whether a trial restores agreement, surely, over enough rows, and leaves at most half the disagreement."""
    return (
        corrected >= _RESTORED
        and trial.score.deviations >= _DEVIATIONS
        and 1 - corrected <= 0.5 * (1 - given)
        and trial.score.rows >= max(3, num_rows // 4)
    )


def _judge_as_given(evidence: Evidence, agreement: float | None, chance: float) -> Misalignment:
    stale = find_stale_rows(evidence, chance)
    if stale is not None and _is_stale(stale, chance):
        return Misalignment(
            cause="stale_rows",
            agreement=stale.agreement,
            restored_agreement=stale.agreement_elsewhere,
            chance_agreement=chance,
            advice=advise_stale(*stale),
        )
    if agreement is None:
        classes = {kind.name: int((evidence.classes_TL == kind).sum()) for kind in RowClass if kind >= RowClass.MISSING}
        return Misalignment(cause="random", agreement=None, advice=advise_nothing_checked(classes))
    corrected = _corrected(agreement, chance)
    # where few experts take nearly all tokens, chance is so high that a little noise looks like a lot
    if corrected >= _GOOD or (agreement >= 0.95 and corrected >= 0.3):
        advice = advise_aligned(agreement, chance)
        return Misalignment(cause="aligned", agreement=agreement, chance_agreement=chance, advice=advice)
    advice = advise_unexplained(agreement, chance)
    return Misalignment(cause="random", agreement=agreement, chance_agreement=chance, advice=advice)


def _is_stale(stale: Stale, chance: float) -> bool:
    """Whether runs of equal rows are the trouble, and not something that also spoils the rows outside them."""
    outside = stale.agreement_elsewhere
    return stale.rows >= 0.5 * stale.usable or (outside is not None and _corrected(outside, chance) >= _RESTORED)

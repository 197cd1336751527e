"""The replay check: replayed routes against the router's own choice, counted on the device.

    comparison = compare_routes(replayed, own, num_experts=128)
    comparison.agreement, comparison.zero_overlap_ratio

Letters: T tokens, K experts chosen per token (top-k), E experts, C counters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from moe_telemetry.errors import RoutesError
from moe_telemetry.replay.classes import RowClass, check_ids, class_of_rows, equal_run_lengths, usable_rows
from moe_telemetry.replay.order import SequenceStarts
from moe_telemetry.replay.overlap import NarrowIds, count_shared, narrow_ids
from moe_telemetry.replay_totals import REPLAY_COUNTERS, ReplayTotals

__all__ = ["RouteComparison", "RowComparison", "combine_counts", "compare_routes", "compare_rows"]

_NUM_CLASSES = len(RowClass) - 2  # without the two kinds of padding


@dataclass(frozen=True, eq=False)
class RouteComparison:
    """What one comparison counted: zero-dimensional int64 tensors on the inputs' device.

    The ratios are formed on the host and wait for the device; `totals` reads all counts at once.
    """

    num_experts: int
    top_k: int
    vector: Tensor = field(repr=False)
    """int64 `[C]`, the counts in the order of `REPLAY_COUNTERS`; `combine_counts` adds them up."""
    replayed: Tensor
    missing: Tensor
    malformed: Tensor
    out_of_range: Tensor
    repeated: Tensor
    placeholder: Tensor
    checked: Tensor
    zero_overlap: Tensor
    shared_experts: Tensor
    tie_checked: Tensor
    tie_shared_experts: Tensor
    routed_padding: Tensor
    longest_equal_run: Tensor

    @property
    def shared(self) -> Tensor:
        """Sum over checked rows of |replayed and own| / K, float64, on the device."""
        return self.shared_experts.to(torch.float64) / self.top_k

    def totals(self) -> ReplayTotals:
        """Return the counts as whole numbers: one copy to the host."""
        return ReplayTotals.from_vector(self.vector.tolist(), num_experts=self.num_experts, top_k=self.top_k)

    @property
    def agreement(self) -> float | None:
        """Shared over checked, or None where no row was checked."""
        return self.totals().agreement

    @property
    def tie_tolerant_agreement(self) -> float | None:
        """Agreement that forgives ties at the top-k boundary; None without scores or without a checked row."""
        return self.totals().tie_tolerant_agreement

    @property
    def zero_overlap_ratio(self) -> float | None:
        """Zero overlap over checked, or None where no row was checked."""
        return self.totals().zero_overlap_ratio

    @property
    def coverage(self) -> float | None:
        """Checked over replayed, or None where nothing was replayed."""
        return self.totals().coverage

    @property
    def chance_agreement(self) -> float:
        """Agreement of random routes: K / E."""
        return self.totals().chance_agreement

    @property
    def chance_zero_overlap(self) -> float:
        """Zero-overlap ratio of random routes: C(E - K, K) / C(E, K)."""
        return self.totals().chance_zero_overlap

    @property
    def chance_corrected_agreement(self) -> float | None:
        """(agreement - K / E) / (1 - K / E), or None where it says nothing."""
        return self.totals().chance_corrected_agreement

    @property
    def blind(self) -> bool:
        """True where random routes would hardly ever have zero overlap, so that only agreement can tell."""
        return self.totals().blind


class RowComparison(NamedTuple):
    """The comparison row by row, for a hook that replays and counts in one go."""

    num_experts: int
    top_k: int
    classes_T: Tensor
    """int8 `[T]`: the `RowClass` of each row."""
    shared_T: Tensor
    """int16 `[T]`: experts shared with the own choice; means nothing where a row is not usable."""
    tie_shared_T: Tensor | None
    """int64 `[T]`: the same, forgiving ties; None without scores."""
    runs_T: Tensor
    """int64 `[T]`: how many equal real rows end at each row."""

    @property
    def usable_T(self) -> Tensor:
        """Bool `[T]`: rows to be replayed as given."""
        return usable_rows(self.classes_T)

    def counts(self) -> RouteComparison:
        """Add the rows up, without a host sync."""
        device = self.classes_T.device
        classes_C = torch.arange(_NUM_CLASSES, dtype=torch.int8, device=device)
        by_class_C = (self.classes_T == classes_C[:, None]).sum(1)
        checked_T = self.classes_T == RowClass.CHECKED.value
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        tie_shared = nothing if self.tie_shared_T is None else (self.tie_shared_T * checked_T).sum()
        sums = [
            (checked_T & (self.shared_T == 0)).sum(),
            (self.shared_T * checked_T).sum(),
            nothing if self.tie_shared_T is None else by_class_C[RowClass.CHECKED.value],
            tie_shared,
            (self.classes_T == RowClass.ROUTED_PADDING.value).sum(),
            self.runs_T.amax() if len(self.runs_T) else nothing,
        ]
        vector_C = torch.cat([by_class_C.sum(0, keepdim=True), by_class_C, torch.stack(sums)])
        return RouteComparison(self.num_experts, self.top_k, vector_C, *vector_C.unbind())


def compare_routes(
    replayed: Tensor,
    own: Tensor,
    *,
    num_experts: int,
    valid: Tensor | None = None,
    sequence_starts: SequenceStarts | None = None,
    row_stride: int = 1,
    scores: Tensor | None = None,
) -> RouteComparison:
    """Compare the replayed routes of one router with its own choice, without a host sync.

    `replayed` and `own` are `[T, K]` of any integer dtype, and are not written to; negative ids mean
    "no route". `valid` is bool `[T]`, True on real tokens. `sequence_starts` is bool `[T]`, or the
    row numbers of the first rows; `row_stride` is B for sequence-first rows (see `token_order`).
    `scores` is float `[T, E]`, what the router selected by, bias included.

    Raises:
        RoutesError: shapes, dtypes or numbers do not fit; the message gives them.
        MaskError: `valid` does not fit.
    """
    rows = compare_rows(
        replayed,
        own,
        num_experts=num_experts,
        valid=valid,
        sequence_starts=sequence_starts,
        row_stride=row_stride,
        scores=scores,
    )
    return rows.counts()


def compare_rows(
    replayed: Tensor,
    own: Tensor,
    *,
    num_experts: int,
    valid: Tensor | None = None,
    sequence_starts: SequenceStarts | None = None,
    row_stride: int = 1,
    scores: Tensor | None = None,
) -> RowComparison:
    """Return the comparison row by row; arguments and errors as those of `compare_routes`."""
    _check_pair(replayed, own, num_experts, scores)
    chosen, others = narrow_ids(replayed, num_experts), narrow_ids(own, num_experts)
    classes_T = class_of_rows(chosen, valid, sequence_starts, row_stride)
    return RowComparison(
        num_experts=num_experts,
        top_k=replayed.shape[1],
        classes_T=classes_T,
        shared_T=count_shared(chosen, others),
        tie_shared_T=None if scores is None else _count_shared_by_score(chosen, others, scores),
        runs_T=equal_run_lengths(classes_T, row_stride),
    )


def combine_counts(total_C: Tensor, step_C: Tensor) -> Tensor:
    """Return `[..., C]`: both counts together, sums added and the longest run kept, without a host sync."""
    longest = torch.maximum(total_C[..., -1:], step_C[..., -1:])
    return torch.cat([total_C[..., :-1] + step_C[..., :-1], longest], dim=-1)


if REPLAY_COUNTERS[-1] != ("longest_equal_run", "max"):  # pragma: no cover
    raise AssertionError("combine_counts relies on the only maximum being the last counter")


def _check_pair(replayed: Tensor, own: Tensor, num_experts: int, scores: Tensor | None) -> None:
    check_ids(replayed, num_experts, "replayed")
    check_ids(own, num_experts, "own")
    if replayed.shape != own.shape:
        raise RoutesError(
            f"replayed has shape {tuple(replayed.shape)}, own {tuple(own.shape)}; "
            "expected one row per token and K experts in both"
        )
    if scores is not None and (scores.shape != (len(own), num_experts) or not scores.is_floating_point()):
        raise RoutesError(
            f"scores has shape {tuple(scores.shape)}, {scores.dtype}; expected float ({len(own)}, {num_experts})"
        )


def _count_shared_by_score(chosen: NarrowIds, own: NarrowIds, scores_TE: Tensor) -> Tensor:
    own_scores_TK = scores_TE.detach().gather(1, own.index_TK)
    # an own choice that the capacity dropped has no id, and must not lower the boundary
    absent_TK = (own.ids_KT == 0).t()
    boundary_T = own_scores_TK.masked_fill(absent_TK, torch.inf).amin(1)
    return (scores_TE.detach().gather(1, chosen.index_TK) >= boundary_T[:, None]).sum(1)

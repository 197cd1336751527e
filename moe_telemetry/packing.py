"""One vector per reduction: everything that ranks tell each other, in blocks of fixed size.

    [header | experts | scores | share of node 0 | of node 1 | ... | view of rank 0 | of rank 1 | ...]

All entries are int64 and are added up over ranks: one all-reduce gives every rank the counts of the
whole job, every node's share of them, and what single ranks saw. A rank fills in the routers that it
owns, its own node's share and its own view, and leaves zeros elsewhere.

Letters: L routers, W cells of all local routers, F fields of a share, V fields of a view, A agreed stages,
N nodes, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_telemetry.counters import NUM_SLOTS
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay_totals import REPLAY_SUMS
from moe_telemetry.score_counters import NUM_SCORE_ROWS, note_bias
from moe_telemetry.score_statistics import NOTHING
from moe_telemetry.taps import PEAKS, Tap
from moe_telemetry.topology import Seat
from moe_telemetry.trace.manifest import TracedRouter

__all__ = ["SHARE_FIELDS", "VIEW_FIELDS", "Layout", "Packing", "Reduced", "Tally"]

SHARE_FIELDS = ("tokens", "padding_tokens", "assignments", "dropped", "invalid", *REPLAY_SUMS)
"""Numbers of a router and stage that every node reports for itself."""

VIEW_FIELDS = ("checked", "zero_overlap", *PEAKS)
"""Numbers that every rank reports for itself: two sums since the start, then peaks of the window."""

_HEADER = 4
_STEP_RANGE = 2**24
"""Steps are compared modulo this number, so that the sum of their squares over ranks stays in range."""
_KINDS = _BELOW, _EXPERT, _ABOVE, _PADDING, _TOP_K = tuple(range(5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The routers of the whole job and their stages, the same on every rank."""

    routers: Mapping[RouterKey, int]
    """Number of experts of every router, in the order of the model."""
    stages: tuple[str, ...]
    has_scores: bool = False
    """Whether score statistics are kept."""
    traced: tuple[TracedRouter, ...] = ()
    """The same routers, as a trace of any rank names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What the job has counted of one router in one stage since the start, as raw integers."""

    experts: tuple[int, ...]
    """Assignments, length E."""
    scores: tuple[int, ...]
    """Score sums as `score_statistics.sum_fields` lists them, `MICROBATCH_FIELDS` behind; empty where none are kept."""
    fields: tuple[int, ...]
    """`SHARE_FIELDS` of all nodes together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """What one reduction says."""

    tallies: Mapping[RouterKey, Mapping[str, Tally]]
    shares: Mapping[RouterKey, Mapping[str, tuple[int, ...]]]
    """`SHARE_FIELDS` of this rank's node."""
    views: Mapping[RouterKey, Sequence[Mapping[str, tuple[int, ...]]]]
    """`VIEW_FIELDS` of every rank by stage; a peak is `NOTHING` where the rank saw nothing."""
    steps_agree: bool
    has_new_stages: bool


class Packing:
    """Fills and reads the vector for one layout, seat and set of local taps."""

    def __init__(self, layout: Layout, taps: Sequence[Tap], seat: Seat, device: torch.device) -> None:
        self._layout = layout
        self._taps = taps
        self._seat = seat
        self._device = device
        order = {key: row for row, key in enumerate(layout.routers)}
        self._rows_L = torch.tensor([order[tap.site.key] for tap in taps], dtype=torch.int64, device=device)
        self._drops_L1 = self._column([tap.site.negative_ids_are_dropped for tap in taps])
        self._top_k_L1 = self._column([tap.site.top_k or 0 for tap in taps])
        self._segments_W = _joined([_segments(row, tap) for row, tap in enumerate(taps)]).to(device)
        self._expert_cells = (self._segments_W % len(_KINDS) == _EXPERT).nonzero().view(-1)
        self._expert_rows = _Ragged(layout, taps, 0, device)
        self._score_rows = _Ragged(layout, taps, NUM_SCORE_ROWS, device)

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device).unsqueeze(1)

    def pack(self, step: int, slots: Mapping[str, int], *, counts: bool) -> Tensor:
        """Return this rank's vector, on the packing's device.

        Args:
            step: the training step, checked to be the same on all ranks.
            slots: the stage slot of every stage this rank knows.
            counts: False on a rank whose tokens another rank counts: it adds zeros.
        """
        num_new = len(set(slots) - set(self._layout.stages))
        vector = torch.zeros(sum(self._sizes), dtype=torch.int64, device=self._device)
        header, experts, scores, shares, views = self._blocks(vector)
        seen = step % _STEP_RANGE
        header.copy_(torch.tensor([1, seen, seen * seen, num_new], device=self._device))
        if counts and self._taps:
            columns = torch.tensor([slots.get(stage, NUM_SLOTS) for stage in self._layout.stages], device=self._device)
            cells_WA = self._staged([tap.cells for tap in self._taps], columns)
            experts.index_copy_(0, self._expert_rows.homes, cells_WA[self._expert_cells])
            if self._layout.has_scores:
                found = self._staged([tap.scores for tap in self._taps], columns)
                scores.index_copy_(0, self._score_rows.homes, found)
            shares[self._seat.node].index_copy_(0, self._rows_L, self._fields(cells_WA, columns))
            views[self._seat.rank].index_copy_(0, self._rows_L, self._views(columns))
        return vector

    @property
    def _sizes(self) -> tuple[int, ...]:
        num_routers, num_stages = len(self._layout.routers), len(self._layout.stages)
        return (
            _HEADER,
            self._expert_rows.num_rows * num_stages,
            self._score_rows.num_rows * num_stages * self._layout.has_scores,
            self._seat.num_nodes * num_routers * len(SHARE_FIELDS) * num_stages,
            self._seat.num_ranks * num_routers * len(VIEW_FIELDS) * num_stages,
        )

    def _blocks(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Return views: header `[4]`, experts and scores `[rows, A]`, shares `[N, L, F, A]`, views `[R, L, V, A]`."""
        header, experts, scores, shares, views = vector.split(self._sizes)
        num_routers, num_stages = len(self._layout.routers), len(self._layout.stages)
        return (
            header,
            experts.view(-1, num_stages),
            scores.view(-1, num_stages),
            shares.view(self._seat.num_nodes, num_routers, len(SHARE_FIELDS), num_stages),
            views.view(self._seat.num_ranks, num_routers, len(VIEW_FIELDS), num_stages),
        )

    def _staged(self, tensors: Sequence[Tensor], columns: Tensor) -> Tensor:
        """Return the rows of all tensors with one column an agreed stage; one that is unknown here is zero."""
        rows_WS = torch.cat([tensor.to(self._device) for tensor in tensors])
        return torch.nn.functional.pad(rows_WS, (0, 1))[:, columns]

    def _fields(self, cells_WA: Tensor, columns: Tensor) -> Tensor:
        """Return `[L, F, A]`: the share fields of the local routers."""
        num_routers, num_stages = len(self._taps), cells_WA.shape[1]
        sums = cells_WA.new_zeros(num_routers * len(_KINDS), num_stages).index_add_(0, self._segments_W, cells_WA)
        below, placed, above, padding, seen_top_k = sums.view(num_routers, len(_KINDS), num_stages).unbind(1)
        top_k = torch.where(self._top_k_L1 > 0, self._top_k_L1, seen_top_k.clamp(min=1))
        dropped = below * self._drops_L1
        counts = ((below + placed + above) // top_k, padding // top_k, placed, dropped, above + below - dropped)
        replay = self._staged([tap.replay for tap in self._taps], columns)
        return torch.cat([torch.stack(counts, dim=1), replay.view(num_routers, len(REPLAY_SUMS), num_stages)], dim=1)

    def _views(self, columns: Tensor) -> Tensor:
        """Return `[L, V, A]`, peaks with 0 for nothing, as the zeros of other ranks say."""
        if self._layout.has_scores:
            for tap in self._taps:
                note_bias(tap.peaks, tap.site)
        checked = slice(REPLAY_SUMS.index("checked"), REPLAY_SUMS.index("zero_overlap") + 1)
        rows = [torch.cat([tap.replay[checked], tap.peaks - NOTHING]) for tap in self._taps]
        return self._staged(rows, columns).view(len(self._taps), len(VIEW_FIELDS), len(columns))

    def begin_peaks(self) -> None:
        """Begin the peaks of the next window, once those of this one have crossed."""
        for tap in self._taps:
            tap.peaks.fill_(NOTHING)

    def unpack(self, vector: Tensor) -> Reduced:
        """Read a vector that was added up over all ranks."""
        header, experts, scores, shares, views = self._blocks(vector.cpu())
        ranks, step, squares, num_new = header.tolist()
        fields = shares.sum(0).transpose(1, 2).tolist()
        own_fields = shares[self._seat.node].transpose(1, 2).tolist()
        columns = [experts.t().tolist(), scores.t().tolist()]
        tallies = {
            key: {stage: self._tally(key, column, columns, fields[row]) for column, stage in self._stages()}
            for row, key in enumerate(self._layout.routers)
        }
        return Reduced(
            tallies=tallies,
            shares={
                key: {stage: tuple(own_fields[row][column]) for column, stage in self._stages()}
                for row, key in enumerate(self._layout.routers)
            },
            views=dict(zip(tallies, self._by_router(views), strict=True)),
            steps_agree=ranks * squares == step * step,
            has_new_stages=num_new > 0,
        )

    def _stages(self) -> Iterator[tuple[int, str]]:
        return enumerate(self._layout.stages)

    def _by_router(self, views_RLVA: Tensor) -> list[list[dict[str, tuple[int, ...]]]]:
        views_RLVA[:, :, -len(PEAKS) :] += NOTHING
        views = views_RLVA.permute(1, 0, 3, 2).tolist()
        return [[{stage: tuple(view[column]) for column, stage in self._stages()} for view in ranks] for ranks in views]

    def _tally(
        self, key: RouterKey, column: int, columns: Sequence[Sequence[list[int]]], fields: Sequence[Sequence[int]]
    ) -> Tally:
        experts, scores = columns
        return Tally(
            experts=tuple(experts[column][self._expert_rows.span(key)]),
            scores=tuple(scores[column][self._score_rows.span(key)]),
            fields=tuple(fields[column]),
        )


class _Ragged:
    """Rows of a block in which each router has E rows and some more: where they are, and the local ones among them."""

    def __init__(self, layout: Layout, taps: Sequence[Tap], num_more: int, device: torch.device) -> None:
        self._spans: dict[RouterKey, slice] = {}
        self.num_rows = 0
        for key, num_experts in layout.routers.items():
            self._spans[key] = slice(self.num_rows, self.num_rows + num_experts + num_more)
            self.num_rows += num_experts + num_more
        spans = [self._spans[tap.site.key] for tap in taps]
        self.homes = _joined([torch.arange(span.start, span.stop) for span in spans]).to(device)

    def span(self, key: RouterKey) -> slice:
        """Return the rows of one router."""
        return self._spans[key]


def _segments(row: int, tap: Tap) -> Tensor:
    """Return for each cell of a router what it holds: 5 * row + one of the five kinds."""
    kinds = [_BELOW, *[_EXPERT] * tap.site.num_experts, _ABOVE, _PADDING, _TOP_K]
    return torch.tensor(kinds) + len(_KINDS) * row


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])

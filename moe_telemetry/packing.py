"""One vector per reduction: header, assignments by expert, and every node's share of the rest.

    [ranks, step, step squared, stages yet unknown | expert assignments | share of node 0 | of node 1 | ...]

All entries are int64 and are added up over ranks, so one all-reduce gives every rank the whole job's
counts and every node's share of them. A rank fills the routers that it owns and its own node's share.

Letters: L routers, W cells of all local routers, N nodes, F share fields, A agreed stages, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_telemetry.counters import NUM_SLOTS
from moe_telemetry.identity import RouterKey
from moe_telemetry.records import Counts, Share
from moe_telemetry.taps import Tap
from moe_telemetry.topology import Seat

__all__ = ["Layout", "Packing", "Reduced"]

_HEADER = 4
_KINDS = _BELOW, _EXPERT, _ABOVE, _PADDING, _TOP_K = tuple(range(5))
_FIELDS = ("tokens", "padding_tokens", "assignments", "dropped", "invalid")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The routers of the whole job and their stages, the same on every rank."""

    routers: Mapping[RouterKey, int]
    """Number of experts of every router, in the order of the model."""
    stages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """What one reduction says, by router and stage."""

    totals: Mapping[RouterKey, Mapping[str, Counts]]
    shares: Mapping[RouterKey, Mapping[str, Share]]
    steps_agree: bool
    has_new_stages: bool


class Packing:
    """Fills and reads the vector for one layout, seat and set of local taps."""

    def __init__(self, layout: Layout, taps: Sequence[Tap], seat: Seat, device: torch.device) -> None:
        self._layout = layout
        self._taps = taps
        self._seat = seat
        self._device = device
        self._segments_W = torch.cat([_segments(row, tap) for row, tap in enumerate(taps)] or [_nothing()]).to(device)
        self._rows_L = torch.tensor([list(layout.routers).index(tap.site.key) for tap in taps], device=device)
        self._drops_L = torch.tensor([tap.site.negative_ids_are_dropped for tap in taps], device=device)
        self._top_k_L1 = torch.tensor([[tap.site.top_k or 0] for tap in taps], device=device)
        self._experts_W, self._homes = self._place_experts()
        num_stages = len(layout.stages)
        self._num_expert_cells = sum(layout.routers.values()) * num_stages
        self._num_share_cells = len(layout.routers) * len(_FIELDS) * num_stages

    def _place_experts(self) -> tuple[Tensor, Tensor]:
        """Return where the local expert cells stand, and where they go among all experts of the job."""
        starts = {}
        start = 0
        for key, num_experts in self._layout.routers.items():
            starts[key] = start
            start += num_experts
        homes = [torch.arange(tap.site.num_experts) + starts[tap.site.key] for tap in self._taps]
        cells = (self._segments_W % len(_KINDS) == _EXPERT).nonzero().view(-1)
        return cells, torch.cat(homes or [_nothing()]).to(self._device)

    def pack(self, step: int, slots: Mapping[str, int], *, counts: bool) -> Tensor:
        """Return this rank's vector, on the packing's device.

        Args:
            step: the training step, checked to be the same on all ranks.
            slots: the stage slot of every stage this rank knows.
            counts: False on a rank whose tokens another rank counts: it adds zeros.
        """
        stages = self._layout.stages
        num_new = len(set(slots) - set(stages))
        vector = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        vector[:_HEADER] = torch.tensor([1, step, step * step, num_new], device=self._device)
        if counts and self._taps:
            cells_WA = self._cells(slots)
            self._experts_of(vector).index_copy_(0, self._homes, cells_WA[self._experts_W])
            self._share_of(vector, self._seat.node).index_copy_(0, self._rows_L, self._fields(cells_WA))
        return vector

    @property
    def size(self) -> int:
        """Number of entries of the vector."""
        return _HEADER + self._num_expert_cells + self._seat.num_nodes * self._num_share_cells

    def _cells(self, slots: Mapping[str, int]) -> Tensor:
        cells_WS = torch.cat([tap.cells.to(self._device) for tap in self._taps])
        # a stage that this rank has not met reads the column of zeros behind the slots
        columns = [slots.get(stage, NUM_SLOTS) for stage in self._layout.stages]
        padded = torch.nn.functional.pad(cells_WS, (0, 1))
        return padded[:, torch.tensor(columns, device=self._device)]

    def _fields(self, cells_WA: Tensor) -> Tensor:
        """Return `[L, F, A]`: the share fields of the local routers."""
        num_routers, num_stages = len(self._taps), cells_WA.shape[1]
        sums = cells_WA.new_zeros(num_routers * len(_KINDS), num_stages).index_add_(0, self._segments_W, cells_WA)
        below, placed, above, padding, seen_top_k = sums.view(num_routers, len(_KINDS), num_stages).unbind(1)
        top_k = torch.where(self._top_k_L1 > 0, self._top_k_L1, seen_top_k.clamp(min=1))
        dropped = below * self._drops_L.unsqueeze(1)
        fields = ((below + placed + above) // top_k, padding // top_k, placed, dropped, above + below - dropped)
        return torch.stack(fields, dim=1)

    def _experts_of(self, vector: Tensor) -> Tensor:
        """Return the view `[experts of all routers, A]` of a vector."""
        return vector[_HEADER : _HEADER + self._num_expert_cells].view(-1, len(self._layout.stages))

    def _share_of(self, vector: Tensor, node: int) -> Tensor:
        """Return the view `[L, F, A]` of a vector."""
        start = _HEADER + self._num_expert_cells + node * self._num_share_cells
        share = vector[start : start + self._num_share_cells]
        return share.view(len(self._layout.routers), len(_FIELDS), len(self._layout.stages))

    def unpack(self, vector: Tensor) -> Reduced:
        """Read a vector that was added up over all ranks."""
        vector = vector.cpu()
        ranks, step, squares, num_new = vector[:_HEADER].tolist()
        shares = [self._share_of(vector, node).tolist() for node in range(self._seat.num_nodes)]
        experts = self._experts_of(vector).t().tolist()
        return Reduced(
            totals=self._totals(shares, experts),
            shares={key: self._stage_shares(shares[self._seat.node][row]) for row, key in self._rows()},
            steps_agree=ranks * squares == step * step,
            has_new_stages=num_new > 0,
        )

    def _rows(self) -> Sequence[tuple[int, RouterKey]]:
        return list(enumerate(self._layout.routers))

    def _totals(
        self, shares: list[list[list[list[int]]]], experts: list[list[int]]
    ) -> dict[RouterKey, dict[str, Counts]]:
        totals: dict[RouterKey, dict[str, Counts]] = {}
        start = 0
        for row, (key, num_experts) in enumerate(self._layout.routers.items()):
            by_field = zip(*(share[row] for share in shares), strict=True)
            fields = [[sum(values) for values in zip(*by_node, strict=True)] for by_node in by_field]
            totals[key] = {
                stage: Counts(
                    tokens=fields[0][column],
                    padding_tokens=fields[1][column],
                    assignments=tuple(experts[column][start : start + num_experts]),
                    dropped=fields[3][column],
                    invalid=fields[4][column],
                )
                for column, stage in enumerate(self._layout.stages)
            }
            start += num_experts
        return totals

    def _stage_shares(self, fields: list[list[int]]) -> dict[str, Share]:
        return {
            stage: Share(**dict(zip(_FIELDS, values, strict=True)))
            for stage, values in zip(self._layout.stages, zip(*fields, strict=True), strict=True)
        }


def _segments(row: int, tap: Tap) -> Tensor:
    """Return for each cell of a router what it holds: 5 * row + one of the five kinds."""
    kinds = [_BELOW, *[_EXPERT] * tap.site.num_experts, _ABOVE, _PADDING, _TOP_K]
    return torch.tensor(kinds) + len(_KINDS) * row


def _nothing() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)

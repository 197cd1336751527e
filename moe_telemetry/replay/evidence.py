"""A sample of replayed and own rows, and how well they agree when rows are paired otherwise.

Letters: T rows (tokens), L layers, K experts a token, E experts, n sampled rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_telemetry.replay.classes import RowClass, classify_rows
from moe_telemetry.replay.geometry import Geometry
from moe_telemetry.replay.overlap import count_shared_by_pairs, narrow_ids

__all__ = ["Cause", "Evidence", "Score", "Trial", "expected_agreement", "shared_fraction"]

Cause = Literal[
    "aligned",
    "token_shift",
    "batch_sequence_swap",
    "layer_shift",
    "context_parallel_order",
    "sequence_swap",
    "expert_remap",
    "dtype_wrap",
    "stale_rows",
    "random",
]
"""What may be wrong with a replay; `random`: unrelated rows, or nothing known explains them."""

_MAX_ROWS = 2048
_MAX_LAYERS = 4
_ID_LIMIT = 2**16


class Score(NamedTuple):
    """How well rows agree under one hypothesis."""

    agreement: float
    """Mean share of replayed experts among those of the row's partner; 0 where no row has one."""
    rows: int
    """Rows with a partner."""
    deviations: float
    """By how many standard errors it is better than the rows as given."""


class Trial(NamedTuple):
    """One cause with its offset, and how well rows agree when it is undone."""

    cause: Cause
    offset: int
    score: Score
    chance: float | None = None
    """Agreement of unrelated rows under it, where that is not what it is for the rows as given."""
    given: float | None = None
    """Agreement as given, where it is measured over other rows than the sampled ones."""


def shared_fraction(chosen: Tensor, own: Tensor) -> Tensor:
    """Return float `[...]`: the share of `chosen` `[..., K]` that is among `own` `[..., K]`; ids of rows in use."""
    chosen_KX, own_KX = (narrow_ids(ids.reshape(-1, ids.shape[-1]), _ID_LIMIT).ids_KT for ids in (chosen, own))
    return count_shared_by_pairs(chosen_KX, own_KX).reshape(chosen.shape[:-1]) / chosen.shape[-1]


@dataclass(frozen=True, eq=False)
class Evidence:
    """Rows of one router `[T, 1, K]` or of all routers `[T, L, K]`, on the CPU, with a fixed sample of them."""

    replayed_TLK: Tensor
    own_TLK: Tensor
    classes_TL: Tensor
    """int8: the `RowClass` of each replayed row."""
    valid_T: Tensor
    num_experts: int
    geometry: Geometry
    rows_n: Tensor
    """The sampled rows: valid, and checked in at least one sampled layer."""
    layers: list[int]
    """The sampled layers."""

    @classmethod
    def gather(
        cls, replayed_TLK: Tensor, own_TLK: Tensor, valid_T: Tensor, num_experts: int, geometry: Geometry
    ) -> Evidence:
        """Classify all rows and draw the sample, the same one each time."""
        last = replayed_TLK.shape[1] - 1
        layers = sorted({round(i * last / (_MAX_LAYERS - 1)) for i in range(_MAX_LAYERS)})
        classes_TL = _classify(replayed_TLK, valid_T, num_experts, geometry)
        rows_n = (classes_TL[:, layers] == RowClass.CHECKED).any(1).nonzero()[:, 0]
        # a generator of its own: a check draws no random number that training would have drawn
        chosen_n = torch.randperm(len(rows_n), generator=torch.Generator().manual_seed(0))[:_MAX_ROWS]
        rows_n = rows_n[chosen_n.sort().values]
        return cls(replayed_TLK, own_TLK, classes_TL, valid_T, num_experts, geometry, rows_n, layers)

    @cached_property
    def given_n(self) -> Tensor:
        """Float `[n]`: agreement of each sampled row as given."""
        return self.fractions(self.rows_n)

    @property
    def num_layers(self) -> int:
        """L, the number of router layers."""
        return self.replayed_TLK.shape[1]

    @property
    def agreement(self) -> float:
        """Mean agreement of the sampled rows as given."""
        return float(self.given_n.mean())

    def fractions(self, partner_n: Tensor) -> Tensor:
        """Return float `[n]`: agreement of each sampled row with row `partner_n` of the own choice, NaN at -1."""
        index = (self.rows_n[:, None], torch.tensor(self.layers))
        known_nL = (self.classes_TL[index] == RowClass.CHECKED).float()
        partner = partner_n.clamp(min=0)
        own_nLK = self.own_TLK[partner[:, None], index[1]]
        mean_n = (shared_fraction(self.replayed_TLK[index], own_nLK) * known_nL).sum(1) / known_nL.sum(1)
        return mean_n.masked_fill((partner_n < 0) | ~self.valid_T[partner], torch.nan)

    def score(self, partner_n: Tensor) -> Score:
        """Return how well the sampled rows agree with those rows of the own choice; -1 has no partner."""
        return self.score_fractions(self.fractions(partner_n), self.given_n)

    @staticmethod
    def score_fractions(fractions_n: Tensor, given_n: Tensor) -> Score:
        """Return the score of agreements, NaN where there is none, against those as given."""
        known_n = ~fractions_n.isnan() & ~given_n.isnan()
        count = int(known_n.sum())
        if count == 0:
            return Score(0.0, 0, 0.0)
        gains_n = (fractions_n - given_n)[known_n]
        # the added part keeps a handful of equal gains from looking like certainty
        error = math.sqrt((float(gains_n.var(correction=0)) + 0.5 / count) / count)
        return Score(float(fractions_n[known_n].mean()), count, float(gains_n.mean()) / error)

    def chance(self) -> float:
        """Return the agreement of unrelated rows, by how popular each expert is in the sampled ones."""
        if not len(self.rows_n):
            return 0.0
        index = (self.rows_n[:, None], torch.tensor(self.layers))
        return expected_agreement(self.replayed_TLK[index], self.own_TLK[index], self.num_experts)


def expected_agreement(replayed_nLK: Tensor, own_nLK: Tensor, num_experts: int) -> float:
    """Return the mean agreement of a replayed row with the own choice of another row, averaged over layers."""
    rows, layers, top_k = own_nLK.shape
    both = sum(
        float((_popularity(replayed_nLK[:, layer], num_experts) * _popularity(own_nLK[:, layer], num_experts)).sum())
        for layer in range(layers)
    )
    # of all pairs, those of a row with itself are no chance; in a small sample they weigh
    paired = float(shared_fraction(replayed_nLK, own_nLK).mean())
    return min(max((rows * both / (layers * top_k) - paired) / max(rows - 1, 1), 0.0), 1.0)


def _classify(replayed_TLK: Tensor, valid_T: Tensor, num_experts: int, geometry: Geometry) -> Tensor:
    order_T = geometry.in_token_order()
    starts_T = geometry.position_T[order_T] == 0
    classes_TL = torch.empty(replayed_TLK.shape[:2], dtype=torch.int8)
    for layer in range(replayed_TLK.shape[1]):
        classes_TL[order_T, layer] = classify_rows(
            replayed_TLK[order_T, layer], num_experts=num_experts, valid=valid_T[order_T], sequence_starts=starts_T
        )
    return classes_TL


def _popularity(ids_nK: Tensor, num_experts: int) -> Tensor:
    inside = (ids_nK >= 0) & (ids_nK < num_experts)
    return torch.bincount(ids_nK[inside], minlength=num_experts).double() / max(len(ids_nK), 1)

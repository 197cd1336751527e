"""Score statistics of one router, formed on the host from sums that were added up over ranks.

What crosses ranks is data: `MEAN_FIELDS` and `COUNT_FIELDS` give the layout of the summed vector,
`MAX_FIELDS` of the vector whose largest entries are kept.

    [sums of the means | rows in each of them | nan_rows, valid_rows | probability of expert 0, 1, ...]

A router's counters hold `MICROBATCH_FIELDS` behind them.

All entries are int64 in fixed point, so they add up to the same integer in any order of rows and
ranks. A long run makes them wrap; `wrapped_difference` of two readings is exact all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Literal

__all__ = [
    "COUNT_FIELDS",
    "MAX_FIELDS",
    "MEAN_FIELDS",
    "MICROBATCH_FIELDS",
    "NOTHING",
    "NUM_SUM_FIELDS",
    "PROBABILITY_SCALE",
    "ScoreFunction",
    "ScoreKind",
    "ScoreStatistics",
    "SumField",
    "microbatch_max_violation",
    "sum_fields",
    "wrapped_difference",
]

ScoreKind = Literal["logits", "probabilities", "auto"]
"""What a router's scores are: `logits`; `probabilities`, meaning that the score function was applied
already (they need not add up to 1); `auto`, told apart token by token on the device: a softmax's rows
add up to 1, a sigmoid's lie between 0 and 1 (safe from 32 experts on). A sqrtsoftplus has no such mark."""

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""What makes a router's scores of its logits."""

_FINE = float(2**24)
_COARSE = float(2**16)

NOTHING = -(2**62)
"""What an entry of the kept maxima holds before the first value; every value is above it."""

PROBABILITY_SCALE = float(2**23)
"""Units per 1.0 in the sums of probability by expert: the grid of float32 between 1 and 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SumField:
    """One number of a vector that crosses ranks: stored = round(value * scale)."""

    name: str
    scale: float
    """Units per 1.0; negative where the vector holds the value with its sign turned."""


MEAN_FIELDS = (
    SumField(name="score", scale=_FINE),
    SumField(name="entropy", scale=-_FINE),
    SumField(name="z", scale=_COARSE),
    SumField(name="selected_mass", scale=_FINE),
    SumField(name="boundary_margin", scale=_FINE),
    SumField(name="bias_overlap", scale=_FINE),
)
"""Means over tokens: two entries each, the sum of the rows' values and, behind all sums, its number of rows."""

COUNT_FIELDS = (SumField(name="nan_rows", scale=1.0), SumField(name="valid_rows", scale=1.0))
"""Valid rows with a NaN, and all valid rows."""

MAX_FIELDS = (
    SumField(name="logit_max", scale=_FINE),
    SumField(name="bias_max", scale=_FINE),
    SumField(name="bias_min", scale=-_FINE),
    SumField(name="bias_std", scale=_FINE),
)
"""Kept by maximum. The bias is the same on every rank, so the maximum over ranks is the bias itself."""

MICROBATCH_FIELDS = (SumField(name="violation", scale=_FINE), SumField(name="microbatches", scale=1.0))
"""MaxVio of single router calls added up, and the number of calls that assigned anything."""

NUM_SUM_FIELDS = 2 * len(MEAN_FIELDS) + len(COUNT_FIELDS)
"""Entries of the summed vector in front of those by expert."""


_HEAD_FIELDS = (
    *MEAN_FIELDS,
    *(SumField(name=f"{field.name}_rows", scale=1.0) for field in MEAN_FIELDS),
    *COUNT_FIELDS,
)


def sum_fields(num_experts: int) -> tuple[SumField, ...]:
    """Return what each entry of a router's summed vector is, length NUM_SUM_FIELDS + E."""
    experts = (SumField(name=f"probability_{e}", scale=PROBABILITY_SCALE) for e in range(num_experts))
    return (*_HEAD_FIELDS, *experts)


def microbatch_max_violation(sums: Sequence[int]) -> float | None:
    """Return the mean over microbatches of MaxVio from `MICROBATCH_FIELDS`, None where nothing was assigned."""
    violation, microbatches = sums
    return violation / MICROBATCH_FIELDS[0].scale / microbatches if microbatches else None


def wrapped_difference(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return now - before of int64 sums that may have wrapped in between, as numbers below 2**63."""
    return [(a - b + 2**63) % 2**64 - 2**63 for a, b in zip(now, before, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreStatistics:
    """What the scores of one router say about it; None where nothing was there to measure."""

    rows: int
    """Valid tokens with finite scores: those that the means are taken over."""
    nan_rows: int
    """Valid tokens with a NaN among their scores; they are in no mean."""
    infinite_rows: int
    """Valid tokens with an infinity, a score beyond 1e19, or a probability below 0; they are in no mean."""
    score_mean: float | None
    """Mean over tokens and experts of the scores as the router gave them (a drift of the logits)."""
    entropy: float | None
    """Mean entropy of a token's distribution over experts, over log E; 1 is undecided, 0 is certain."""
    selected_mass: float | None
    """Mean probability that a token's K chosen experts have together."""
    boundary_margin: float | None
    """Mean of max(0, min chosen - max unchosen) / min chosen; 0 where a choice is decided by rounding."""
    z: float | None
    """Mean squared log-sum-exp of the logits (z-loss of arXiv:2202.08906, without its coefficient)."""
    logit_max: float | None
    """Largest logit of any token."""
    balance_loss: float | None
    """E * sum over experts of (share of assignments * mean probability): the load-balancing loss of
    arXiv:2101.03961 in the form where 1.0 is balanced for any K, and E / K is the worst."""
    bias_overlap: float | None
    """Mean share of a token's chosen experts that the scores alone would have chosen, without the bias."""
    bias_min: float | None
    bias_max: float | None
    bias_std: float | None
    """Population standard deviation of the expert bias."""
    mean_probabilities: tuple[float, ...] | None
    """Mean probability of each expert, length E."""

    @classmethod
    def of(
        cls, sums: Sequence[int], maxima: Sequence[int] = (), assignments: Sequence[int] = ()
    ) -> ScoreStatistics | None:
        """Return the statistics of one window, or None where it had no valid token.

        Args:
            sums: int64 entries as `sum_fields` lists them, length NUM_SUM_FIELDS + E.
            maxima: entries as `MAX_FIELDS` lists them; those that are missing at the end are absent.
            assignments: assignments per expert of the same window, length E, for the balance loss.
        """
        num_experts = len(sums) - NUM_SUM_FIELDS
        fields = {field.name: total for field, total in zip(_HEAD_FIELDS, sums, strict=False)}
        rows = fields["score_rows"]
        if fields["valid_rows"] == 0:
            return None
        means = {field.name: _mean(fields, field) for field in MEAN_FIELDS}
        probabilities = _probabilities(sums[NUM_SUM_FIELDS:], rows)
        return cls(
            rows=rows,
            nan_rows=fields["nan_rows"],
            infinite_rows=fields["valid_rows"] - rows - fields["nan_rows"],
            score_mean=means["score"],
            entropy=_over_uniform(means["entropy"], num_experts),
            selected_mass=means["selected_mass"],
            boundary_margin=means["boundary_margin"],
            z=means["z"],
            bias_overlap=means["bias_overlap"],
            balance_loss=_balance_loss(probabilities, assignments),
            mean_probabilities=probabilities,
            **_maxima(maxima),
        )


def _mean(fields: Mapping[str, int], field: SumField) -> float | None:
    rows = fields[f"{field.name}_rows"]
    return fields[field.name] / field.scale / rows if rows else None


def _over_uniform(entropy: float | None, num_experts: int) -> float | None:
    if entropy is None:
        return None
    # rounding may leave a certain router a hair below 0, or an undecided one above 1
    return min(max(entropy / math.log(num_experts), 0.0), 1.0)


def _probabilities(sums: Sequence[int], rows: int) -> tuple[float, ...] | None:
    unit = PROBABILITY_SCALE * rows
    return tuple([total / unit for total in sums]) if rows else None


def _balance_loss(probabilities: tuple[float, ...] | None, assignments: Sequence[int]) -> float | None:
    total = sum(assignments)
    if probabilities is None or total == 0:
        return None
    return len(probabilities) * math.fsum(map(mul, assignments, probabilities)) / total


def _maxima(maxima: Sequence[int]) -> dict[str, float | None]:
    stored = (*maxima, *[NOTHING] * (len(MAX_FIELDS) - len(maxima)))
    return {
        field.name: None if value <= NOTHING else value / field.scale
        for field, value in zip(MAX_FIELDS, stored, strict=True)
    }

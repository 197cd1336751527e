"""Load statistics of one router from its assignments per expert.

Counts come in already reduced over ranks, so every ratio here is formed last. A statistic of no
assignments is None: a ratio over nothing is absent, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LoadStats", "hottest_experts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadStats:
    """How evenly the assignments of one router are spread over its E experts."""

    max_violation: float
    """MaxVio: largest load over mean load, minus 1 (arXiv:2408.15664); 0 is balanced, E - 1 the worst."""
    min_violation: float
    """MinVio: smallest load over mean load, minus 1; 0 is balanced, -1 means a dead expert."""
    cv: float
    """Coefficient of variation: population standard deviation over mean."""
    entropy: float
    """Entropy of the load over log E; 1 is balanced, 0 means one expert takes all."""
    gini: float
    """Gini coefficient; 0 is balanced, (E - 1) / E means one expert takes all."""
    dead_experts: int
    """Experts that received no assignment."""

    @classmethod
    def of(cls, assignments: Sequence[int]) -> LoadStats | None:
        """Return the statistics of `assignments` (length E), or None where nothing was assigned."""
        total = sum(assignments)
        if total == 0:
            return None
        num_experts = len(assignments)
        mean = total / num_experts
        loads = sorted(assignments)
        return cls(
            max_violation=loads[-1] / mean - 1,
            min_violation=loads[0] / mean - 1,
            cv=math.sqrt(math.fsum((load - mean) ** 2 for load in loads) / num_experts) / mean,
            entropy=_normalised_entropy(loads, total),
            gini=sum((2 * rank - num_experts - 1) * load for rank, load in enumerate(loads, 1)) / (num_experts * total),
            dead_experts=sum(load == 0 for load in loads),
        )


def _normalised_entropy(loads: Sequence[int], total: int) -> float:
    if len(loads) == 1:
        return 1.0
    shares = (load / total for load in loads if load)
    return -math.fsum(share * math.log(share) for share in shares) / math.log(len(loads))


def hottest_experts(assignments: Sequence[int], count: int) -> list[tuple[int, float]]:
    """Return the `count` most loaded experts as (expert, share of all assignments), hottest first."""
    total = sum(assignments)
    if total == 0:
        return []
    ranked = sorted(range(len(assignments)), key=lambda expert: (-assignments[expert], expert))
    return [(expert, assignments[expert] / total) for expert in ranked[:count]]

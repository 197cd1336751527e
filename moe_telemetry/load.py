"""Load statistics of one router from its assignments per expert.

Counts come in already reduced over ranks, so every ratio here is formed last. A statistic of no
assignments is None: a ratio over nothing is absent, never 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

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
        return _stats_of(tuple(assignments))


# several exporters, and every scrape between two snapshots, ask for the same window
@lru_cache(maxsize=512)
def _stats_of(assignments: tuple[int, ...]) -> LoadStats | None:
    total = sum(assignments)
    if total == 0:
        return None
    num_experts = len(assignments)
    mean = total / num_experts
    loads = sorted(assignments)
    # whole numbers to the end: exact, and loops that run in C
    squares = sum(map(mul, loads, loads))
    ranked = sum(map(mul, loads, range(1, num_experts + 1)))
    return LoadStats(
        max_violation=loads[-1] / mean - 1,
        min_violation=loads[0] / mean - 1,
        cv=math.sqrt(num_experts * squares - total * total) / total,
        entropy=_normalised_entropy(loads, total),
        gini=(2 * ranked - (num_experts + 1) * total) / (num_experts * total),
        dead_experts=bisect_right(loads, 0),
    )


def _normalised_entropy(loads: Sequence[int], total: int) -> float:
    """Return (log N - sum of n log n / N) / log E of ascending loads n that add up to N."""
    if len(loads) == 1:
        return 1.0
    alive = loads[bisect_right(loads, 0) :]
    entropy = math.log(total) - math.fsum(map(mul, alive, map(math.log, alive))) / total
    return min(1.0, max(0.0, entropy / math.log(len(loads))))  # the difference of two logarithms may miss by an ulp


def hottest_experts(assignments: Sequence[int], count: int) -> list[tuple[int, float]]:
    """Return the `count` most loaded experts as (expert, share of all assignments), hottest first."""
    total = sum(assignments)
    if total == 0:
        return []
    ranked = sorted(range(len(assignments)), key=lambda expert: (-assignments[expert], expert))
    return [(expert, assignments[expert] / total) for expert in ranked[:count]]

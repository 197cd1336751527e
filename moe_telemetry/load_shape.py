"""The shape of an expert load: a histogram of relative load, and the shares of the hottest experts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from heapq import nlargest

__all__ = ["RELATIVE_LOAD_BUCKETS", "hottest_share", "relative_load_histogram"]

_HUNDREDTHS = (0, 10, 25, 50, 75, 100, 125, 150, 200, 400, 800)

RELATIVE_LOAD_BUCKETS = (*(bound / 100 for bound in _HUNDREDTHS), math.inf)
"""Upper bounds of load over mean load, each one included in its bucket; 1 is an expert of average load."""


def relative_load_histogram(assignments: Sequence[int]) -> tuple[int, ...] | None:
    """Return how many experts have at most each relative load of `RELATIVE_LOAD_BUCKETS`.

    The counts are cumulative, as a Prometheus histogram has them, so the last is E; the relative loads
    add up to E as well. None where nothing was assigned.
    """
    total = sum(assignments)
    if total == 0:
        return None
    # in whole numbers, since 0.1 * total is not what it looks like
    unit = 100 * len(assignments)
    loads = sorted([unit * load for load in assignments])
    return (*(bisect_right(loads, bound * total) for bound in _HUNDREDTHS), len(loads))


def hottest_share(assignments: Sequence[int], count: int) -> float | None:
    """Return the share of all assignments that the `count` most loaded experts have, None of nothing.

    For 1, 4 and 16 experts of E a balanced load gives count / E.
    """
    total = sum(assignments)
    return sum(nlargest(count, assignments)) / total if total else None

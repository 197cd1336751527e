"""How alike two loads are: hottest experts, cosine, rank correlation and distances, None where undefined.

A load is a vector of assignments per expert. What is added up over steps is a whole number: a real one becomes
a multiple of 2**-40, so that its sum is the same in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

import numpy as np

from moe_telemetry.analysis.timeline import Vector

__all__ = [
    "cosine",
    "default_top",
    "fixed_point",
    "from_fixed_point",
    "hottest",
    "jensen_shannon",
    "spearman",
    "total_variation",
]

_FIXED_ONE = 1 << 40


def default_top(num_experts: int) -> int:
    """Return how many experts of a router count as hot where nobody says: an eighth, one at least."""
    return max(1, num_experts // 8)


def hottest(load: Vector, top: int) -> frozenset[int]:
    """Return the `top` experts with the largest load, the lower id first among equals; never one without load."""
    loaded = load.nonzero()[0]
    if len(loaded) > top:
        loaded = loaded[np.argsort(-load[loaded], kind="stable")[:top]]
    return frozenset(loaded.tolist())


def cosine(one: Vector, other: Vector) -> float | None:
    """Return the cosine of the angle between two loads; None where one of them is empty."""
    squares = _dot(one, one) * _dot(other, other)
    return _dot(one, other) / math.sqrt(squares) if squares else None


def spearman(one: Vector, other: Vector) -> float | None:
    """Return Spearman's rank correlation, equal loads sharing their mean rank; None where a load is constant."""
    a, b = _centred_ranks(one), _centred_ranks(other)
    squares = _dot(a, a) * _dot(b, b)
    return _dot(a, b) / math.sqrt(squares) if squares else None


def total_variation(one: Sequence[int], other: Sequence[int]) -> float | None:
    """Return half the sum of the differences of two loads as shares: 0 for equal shares, 1 for disjoint ones."""
    num_one, num_other = sum(one), sum(other)
    if not num_one or not num_other:
        return None
    # over a common denominator the sum is exact
    differences = sum(abs(a * num_other - b * num_one) for a, b in zip(one, other, strict=True))
    return differences / (2 * num_one * num_other)


def jensen_shannon(one: Sequence[int], other: Sequence[int]) -> float | None:
    """Return the Jensen-Shannon divergence of two loads as shares, in bits: 0 for equal shares, 1 for disjoint ones."""
    num_one, num_other = sum(one), sum(other)
    if not num_one or not num_other:
        return None
    shares = [(a / num_one, b / num_other) for a, b in zip(one, other, strict=True)]
    terms = [value * math.log2(2 * value / (p + q)) for p, q in shares for value in (p, q) if value]
    return min(1.0, max(0.0, math.fsum(terms) / 2))


def fixed_point(value: float) -> int:
    """Return a whole number whose sums are exact."""
    return round(value * _FIXED_ONE)


def from_fixed_point(total: int, count: int) -> float | None:
    """Return the mean of `count` values whose whole numbers add up to `total`."""
    return total / (count * _FIXED_ONE) if count else None


def _dot(one: Vector, other: Vector) -> int:
    bound = int(np.abs(one).max(initial=0)) * int(np.abs(other).max(initial=0)) * len(one)
    if bound < 2**63:
        return int(one @ other)
    return int(sum(map(mul, one.tolist(), other.tolist())))


def _centred_ranks(load: Vector) -> Vector:
    """Return twice the rank, less its mean: whole numbers, equal ones for equal loads."""
    _, inverse, counts = np.unique(load, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    # of ranks first..last, the mean is half of first + last
    doubled = (2 * last - counts + 1)[inverse]
    return np.asarray(doubled - (len(load) + 1), dtype=np.int64)

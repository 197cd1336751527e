"""Likeness of loads: known values, textbook definitions, and None where there is no answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_telemetry.analysis.measures import (
    cosine,
    default_top,
    fixed_point,
    from_fixed_point,
    hottest,
    jensen_shannon,
    spearman,
    total_variation,
)

LOADS = st.lists(st.integers(0, 10**12), min_size=2, max_size=12)


def _load(*counts: int) -> np.ndarray:
    return np.array(counts, dtype=np.int64)


def _mean_ranks(values: list[int]) -> list[float]:
    """Rank by counting: those below, and half of those that are equal."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def _pearson(one: list[float], other: list[float]) -> float | None:
    mean_one, mean_other = math.fsum(one) / len(one), math.fsum(other) / len(other)
    products = math.fsum((a - mean_one) * (b - mean_other) for a, b in zip(one, other, strict=True))
    squares = [math.fsum((a - mean) ** 2 for a in values) for values, mean in ((one, mean_one), (other, mean_other))]
    return products / math.sqrt(squares[0] * squares[1]) if all(squares) else None


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((1, 2, 3, 4), (10, 20, 30, 40), 1.0),
        ((1, 2, 3, 4), (4, 3, 2, 1), -1.0),
        ((1, 2, 3, 4), (1, 3, 2, 4), 0.8),
        ((0, 0, 5, 5), (1, 2, 3, 4), 0.8944271909999159),  # 2 / sqrt(5)
        ((5, 5, 5), (1, 2, 3), None),
        ((1, 2, 3), (0, 0, 0), None),
    ],
)
def test_rank_correlation_of_known_loads(one: tuple[int, ...], other: tuple[int, ...], expected: float | None) -> None:
    assert spearman(_load(*one), _load(*other)) == expected


@given(
    st.integers(2, 10).flatmap(lambda size: st.tuples(*[st.lists(st.integers(0, 5), min_size=size, max_size=size)] * 2))
)
def test_rank_correlation_is_that_of_mean_ranks(loads: tuple[list[int], list[int]]) -> None:
    expected = _pearson(*(_mean_ranks(load) for load in loads))
    found = spearman(*(_load(*load) for load in loads))
    assert (found is None) == (expected is None)
    assert found is None or found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [((3, 4), (3, 4), 1.0), ((1, 0), (0, 1), 0.0), ((1, 1), (1, 0), 1 / math.sqrt(2)), ((0, 0), (1, 2), None)],
)
def test_cosine_of_known_loads(one: tuple[int, ...], other: tuple[int, ...], expected: float | None) -> None:
    assert cosine(_load(*one), _load(*other)) == expected


@given(LOADS)
def test_a_load_is_like_itself_however_large(load: list[int]) -> None:
    expected = 1.0 if any(load) else None
    assert cosine(_load(*load), _load(*load)) == (expected if expected is None else pytest.approx(expected, abs=1e-15))
    assert spearman(_load(*load), _load(*load)) == (1.0 if len(set(load)) > 1 else None)


def test_the_hottest_have_load_and_the_lower_id_comes_first_among_equals() -> None:
    assert hottest(_load(1, 5, 5, 5, 0), 2) == {1, 2}
    assert hottest(_load(0, 0, 7), 2) == {2}
    assert hottest(_load(0, 0), 1) == frozenset()


def test_an_eighth_is_hot_and_one_at_least() -> None:
    assert [default_top(count) for count in (1, 7, 8, 60, 128)] == [1, 1, 1, 7, 16]


@given(LOADS, st.integers(1, 50))
def test_distances_go_by_shares(load: list[int], factor: int) -> None:
    scaled = [count * factor for count in load]
    if not any(load):
        assert total_variation(load, scaled) is None
        assert jensen_shannon(load, scaled) is None
    else:
        assert total_variation(load, scaled) == 0
        assert jensen_shannon(load, scaled) == pytest.approx(0, abs=1e-12)


@given(
    st.lists(st.floats(-1, 1), max_size=20).flatmap(lambda values: st.tuples(st.just(values), st.permutations(values)))
)
def test_sums_of_fixed_point_are_the_same_in_any_order(values: tuple[list[float], list[float]]) -> None:
    totals = {sum(map(fixed_point, each)) for each in values}
    assert len(totals) == 1
    mean = from_fixed_point(totals.pop(), len(values[0]))
    assert mean is None if not values[0] else mean == pytest.approx(math.fsum(values[0]) / len(values[0]), abs=1e-11)

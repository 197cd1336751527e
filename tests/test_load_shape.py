"""The shape of a load: histogram and shares of the hottest."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_telemetry.load_shape import RELATIVE_LOAD_BUCKETS, hottest_share, relative_load_histogram

loads = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


def test_the_buckets_are_those_of_the_catalogue() -> None:
    expected = [0, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 4, 8, math.inf]
    assert list(RELATIVE_LOAD_BUCKETS) == expected


@given(loads)
def test_a_bucket_holds_the_experts_up_to_its_bound(assignments: list[int]) -> None:
    histogram = relative_load_histogram(assignments)
    if not any(assignments):
        assert histogram is None
        return
    mean = Fraction(sum(assignments), len(assignments))
    bounds = [Fraction(str(bound)) for bound in RELATIVE_LOAD_BUCKETS[:-1]]
    assert histogram == (*(sum(load <= bound * mean for load in assignments) for bound in bounds), len(assignments))


def test_an_expert_of_average_load_is_in_the_bucket_of_one() -> None:
    assert relative_load_histogram([3, 3, 3]) == (0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 3)
    assert relative_load_histogram([0, 0, 0, 8]) == (3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4)


def test_a_load_on_a_bound_that_binary_cannot_hold_is_within_it() -> None:
    # a tenth of a mean of 10
    histogram = relative_load_histogram([1, 19])
    assert histogram is not None
    assert histogram[1] == 1


def test_the_share_of_the_hottest_experts() -> None:
    assert hottest_share([1, 5, 2, 2], 1) == pytest.approx(0.5)
    assert hottest_share([1, 5, 2, 2], 2) == pytest.approx(0.7)
    assert hottest_share([1, 5, 2, 2], 16) == 1.0
    assert hottest_share([0, 0], 1) is None

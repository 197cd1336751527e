"""Load statistics: known values, and what holds for any load."""

from __future__ import annotations

import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_telemetry.load import LoadStats, hottest_experts

loads = st.lists(st.integers(0, 2**40), min_size=1, max_size=64).filter(any)


def _stats(*assignments: int) -> LoadStats:
    stats = LoadStats.of(assignments)
    assert stats is not None
    return stats


def test_maxvio_and_minvio_compare_the_extremes_with_the_mean() -> None:
    assert _stats(0, 3, 3, 2).max_violation == 0.5
    assert _stats(0, 3, 3, 2).min_violation == -1


def test_cv_divides_the_population_deviation_by_the_mean() -> None:
    assert _stats(2, 4, 4, 6).cv == pytest.approx(0.353553, abs=1e-6)


def test_gini_of_one_expert_with_everything_is_all_but_one_share() -> None:
    assert _stats(8, 0, 0, 0).gini == 0.75


def test_an_expert_without_assignments_is_dead() -> None:
    assert _stats(4, 4, 0, 0).dead_experts == 2


@pytest.mark.parametrize(
    ("assignments", "entropy"),
    [((4, 4, 4, 4), 1.0), ((8, 0, 0, 0), 0.0), ((4, 4, 0, 0), 0.5), ((5,), 1.0), ((0, 3, 3, 2), 0.780639)],
)
def test_entropy_is_one_when_balanced_and_zero_when_one_expert_takes_all(
    assignments: tuple[int, ...], entropy: float
) -> None:
    assert _stats(*assignments).entropy == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize("assignments", [(), (0,), (0, 0, 0)])
def test_statistics_of_nothing_are_absent(assignments: tuple[int, ...]) -> None:
    assert LoadStats.of(assignments) is None
    assert hottest_experts(assignments, 3) == []


@given(loads)
def test_every_statistic_is_finite_and_within_its_range(assignments: list[int]) -> None:
    stats = _stats(*assignments)
    num_experts = len(assignments)
    assert -1 <= stats.min_violation <= 1e-9
    assert -1e-9 <= stats.max_violation <= num_experts - 1 + 1e-9
    assert 0 <= stats.entropy <= 1
    assert 0 <= stats.gini <= (num_experts - 1) / num_experts
    assert 0 <= stats.cv <= math.sqrt(num_experts - 1) + 1e-9
    assert (stats.min_violation == -1) == (stats.dead_experts > 0)


@given(loads)
def test_cv_and_gini_are_those_of_their_definitions(assignments: list[int]) -> None:
    stats = _stats(*assignments)
    mean = statistics.fmean(assignments)
    differences = sum(abs(a - b) for a in assignments for b in assignments)
    assert stats.cv == pytest.approx(statistics.pstdev(assignments) / mean, abs=1e-9)
    assert stats.gini == pytest.approx(differences / (2 * len(assignments) ** 2 * mean), abs=1e-9)


@given(loads, st.randoms(use_true_random=False), st.integers(1, 1000))
def test_statistics_ignore_the_order_of_experts_and_the_number_of_tokens(
    assignments: list[int], chance: Random, factor: int
) -> None:
    shuffled = [factor * load for load in assignments]
    chance.shuffle(shuffled)
    before, after = _stats(*assignments), _stats(*shuffled)
    for name in ("max_violation", "min_violation", "cv", "entropy", "gini", "dead_experts"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), abs=1e-9)


def test_two_ranks_that_complement_each_other_are_balanced() -> None:
    reduced = [a + b for a, b in zip([4, 0], [0, 4], strict=True)]
    assert _stats(*reduced).max_violation == 0


def test_the_hottest_experts_come_first_and_ties_go_by_number() -> None:
    assert hottest_experts([1, 4, 1, 4], 3) == [(1, 0.4), (3, 0.4), (0, 0.1)]

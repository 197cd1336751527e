"""Forming ratios from summed integers, without torch."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from moe_telemetry.score_statistics import (
    MAX_FIELDS,
    NOTHING,
    PROBABILITY_SCALE,
    ScoreStatistics,
    sum_fields,
    wrapped_difference,
)


def vector(probabilities: list[float], **values: float) -> list[int]:
    """Return a summed vector with these fields and probability sums."""
    fields = sum_fields(len(probabilities))
    experts = [round(p * PROBABILITY_SCALE) for p in probabilities]
    values.setdefault("valid_rows", values.get("score_rows", 0))
    head = [round(values.get(field.name, 0) * field.scale) for field in fields[: -len(experts)]]
    return head + experts


def of(*args: object) -> ScoreStatistics:
    found = ScoreStatistics.of(*args)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_means_are_formed_from_the_sums_of_all_ranks() -> None:
    ranks = [
        vector([0.0, 0.0], score=6.0, score_rows=3, entropy=3 * math.log(2), entropy_rows=3, z=12.0, z_rows=2),
        vector([0.0, 0.0], score=2.0, score_rows=1, entropy_rows=1, nan_rows=2, valid_rows=4),
    ]
    found = of([sum(pair) for pair in zip(*ranks, strict=True)])
    assert (found.rows, found.nan_rows, found.infinite_rows) == (4, 2, 1)
    assert (found.score_mean, found.z) == (2.0, 6.0)
    assert found.entropy == pytest.approx(0.75)


def test_what_was_not_measured_is_absent() -> None:
    found = of(vector([0.5, 0.5], score_rows=1))
    assert found.z is found.bias_overlap is found.boundary_margin is found.balance_loss is found.logit_max is None
    assert ScoreStatistics.of(vector([0.0, 0.0])) is None


def test_only_rows_that_are_not_finite_leave_counts_alone() -> None:
    found = of(vector([0.0, 0.0], nan_rows=3, valid_rows=3))
    assert found.nan_rows == 3
    assert found.score_mean is found.mean_probabilities is found.entropy is None


def test_two_layers_on_one_expert_each_are_not_balanced_on_average() -> None:
    layers = [of(vector([4.0, 0.0], score_rows=4), (), [4, 0]), of(vector([0.0, 4.0], score_rows=4), (), [0, 4])]
    assert [layer.balance_loss for layer in layers] == [2.0, 2.0]


def test_the_balance_loss_of_a_window_is_that_of_its_sums() -> None:
    # two microbatches that lean to opposite sides balance each other
    assert of(vector([2.0, 2.0], score_rows=4), (), [2, 2]).balance_loss == 1.0
    assert of(vector([3.0, 1.0], score_rows=4), (), [0, 0]).balance_loss is None


def test_maxima_are_read_in_their_own_scale() -> None:
    stored = [round(value * field.scale) for value, field in zip((9.5, 0.5, -0.25, 0.125), MAX_FIELDS, strict=True)]
    found = of(vector([1.0, 0.0], score_rows=1), stored)
    assert (found.logit_max, found.bias_max, found.bias_min, found.bias_std) == (9.5, 0.5, -0.25, 0.125)
    assert of(vector([1.0, 0.0], score_rows=1), [NOTHING]).logit_max is None


def test_rounding_does_not_take_the_entropy_out_of_its_range() -> None:
    assert of(vector([1.0, 0.0], score_rows=1, entropy=-1e-6, entropy_rows=1)).entropy == 0.0
    assert of(vector([1.0, 0.0], score_rows=1, entropy=0.693148, entropy_rows=1)).entropy == 1.0


def test_a_window_is_exact_although_the_sums_wrapped() -> None:
    assert wrapped_difference([-(2**63) + 5, 7, -3], [2**63 - 5, 2, 4]) == [10, 5, -7]


def test_statistics_start_without_torch() -> None:
    modules = "score_statistics, load_shape, capacity, expert_parallel"
    code = f"import sys; from moe_telemetry import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

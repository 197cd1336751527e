"""Which rank holds which expert, and how evenly ranks are loaded."""

from __future__ import annotations

import pytest

from moe_telemetry.errors import ConfigError
from moe_telemetry.expert_parallel import ExpertPlacement, balancedness, rank_balancedness, straggler_factor


def test_balancedness_is_the_mean_over_layers() -> None:
    assert balancedness([[100, 200], [100, 200]]) == 0.75
    # not the balancedness of the layers' sum, which is perfect
    assert balancedness([[100, 200], [200, 100]]) == 0.75
    assert balancedness([[100, 200], [0, 0]]) == 0.75


def test_ratios_over_nothing_are_absent() -> None:
    assert rank_balancedness([0, 0]) is rank_balancedness([]) is None
    assert balancedness([]) is straggler_factor([]) is straggler_factor([[0, 0]]) is None


def test_each_layer_takes_as_long_as_its_most_loaded_rank() -> None:
    assert straggler_factor([[100, 200], [200, 100]]) == pytest.approx(4 / 3)
    # a light layer weighs as little as it takes
    assert straggler_factor([[2, 0], [100, 100]]) == pytest.approx(102 / 101)


def test_experts_lie_in_contiguous_blocks_by_default() -> None:
    placement = ExpertPlacement.contiguous(4, 2)
    assert placement.experts_of_rank == ((0, 1), (2, 3))
    assert placement.expected_rank_load([5, 1, 1, 1]) == (6, 2)


def test_moved_experts_load_the_rank_that_holds_them() -> None:
    placement = ExpertPlacement(((0, 3), (2, 1)))
    assert placement.expected_rank_load([5, 1, 1, 1]) == (6, 2)
    assert placement.logical_load([7, 8, 9, 10]) == (7, 10, 9, 8)


def test_replicas_share_the_load_of_their_expert() -> None:
    placement = ExpertPlacement.of_slots([0, 1, 2, 3, 0, 2], 2)
    assert placement.num_experts == 4
    assert placement.slot_load([10, 1, 4, 1]) == (5, 1, 2, 1, 5, 2)
    assert placement.expected_rank_load([10, 1, 4, 1]) == (8, 8)


def test_logical_and_physical_load_of_counted_slots() -> None:
    placement = ExpertPlacement.of_slots([0, 1, 2, 3, 0, 2], 3)
    slots = [6, 1, 3, 1, 4, 1]
    assert placement.logical_load(slots) == (10, 1, 4, 1)
    assert placement.rank_load(slots) == (7, 4, 5)


def test_ranks_may_hold_different_numbers_of_slots() -> None:
    assert ExpertPlacement(((0, 1, 2), (0,))).expected_rank_load([4, 1, 1]) == (4, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ExpertPlacement.contiguous(10, 4), "10 experts on 4 ranks"),
        (lambda: ExpertPlacement.contiguous(4, 0), "4 experts on 0 ranks"),
        (lambda: ExpertPlacement.of_slots([0, 1, 0], 2), "3 slots on 2 ranks"),
        (lambda: ExpertPlacement(((0, 2), (3, 0))), "expert 1 of 0..3"),
        (lambda: ExpertPlacement(()), "empty"),
        (lambda: ExpertPlacement(((0, -1),)), "expert -1"),
        (lambda: ExpertPlacement.contiguous(4, 2).slot_load([1, 2]), "2 loads for a placement of 4 experts"),
        (lambda: ExpertPlacement.contiguous(4, 2).logical_load([1]), "1 loads for a placement of 4 slots"),
        (lambda: ExpertPlacement.contiguous(4, 2).rank_load([1]), "1 loads for a placement of 4 slots"),
    ],
)
def test_a_wrong_placement_is_named_with_its_numbers(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]

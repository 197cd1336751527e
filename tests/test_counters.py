"""The counting operator: exact integers, no host sync, no effect of recomputation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_telemetry as mt
from moe_telemetry.counters import NUM_SLOTS, count_choices, new_cells, slot_value

CPU = torch.device("cpu")
INTEGERS = [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64]


def _slot(slot: int = 0, device: torch.device = CPU) -> torch.Tensor:
    return torch.tensor(slot_value(slot), device=device)


def _count(choices: torch.Tensor, num_experts: int, valid: torch.Tensor | None = None, top_k: int = 0) -> list[int]:
    cells = new_cells(num_experts, CPU)
    count_choices(cells, _slot(), choices, valid, top_k=top_k, strict=True)
    assert not cells[:-1, 1:].any()
    return cells[:, 0].tolist()


@given(
    ids=st.integers(1, 4).flatmap(
        lambda top_k: st.lists(st.lists(st.integers(-3, 12), min_size=top_k, max_size=top_k), min_size=1, max_size=20)
    ),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_choice_lands_in_exactly_one_cell(ids: list[list[int]], data: st.DataObject) -> None:
    num_experts = 8
    valid = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    below, *experts, above, padding, top_k = _count(torch.tensor(ids), num_experts, torch.tensor(valid))
    real = [choice for row, is_valid in zip(ids, valid, strict=True) if is_valid for choice in row]
    assert experts == [real.count(expert) for expert in range(num_experts)]
    assert below == sum(choice < 0 for choice in real)
    assert above == sum(choice >= num_experts for choice in real)
    assert padding == len(ids[0]) * valid.count(False)
    assert top_k == len(ids[0])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_of_every_integer_dtype_are_counted_exactly(dtype: torch.dtype) -> None:
    assert _count(torch.tensor([[1, 7], [7, 0]], dtype=dtype), 8, top_k=2)[1:9] == [1, 1, 0, 0, 0, 0, 0, 2]


def test_uint16_ids_above_the_range_of_int16_survive() -> None:
    assert _count(torch.tensor([[1, 40_000]], dtype=torch.uint16), 65_536)[40_001] == 1


def test_an_id_beyond_the_experts_is_in_no_expert_count() -> None:
    below, *experts, above, _, _ = _count(torch.tensor([[4, 0], [1, -1]]), 4)
    assert (below, experts, above) == (1, [1, 1, 0, 0], 1)


def test_a_mask_is_applied_along_tokens_also_where_tokens_equal_experts() -> None:
    assert _count(torch.tensor([[0], [0], [2]]), 3, torch.tensor([True, False, True]))[1:4] == [1, 0, 1]


def test_a_routing_map_counts_like_the_ids_it_stands_for_and_tells_what_was_dropped() -> None:
    choices = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)
    below, *experts, above, padding, _ = _count(choices, 4, torch.tensor([1, 1, 0]), top_k=2)
    assert (below, experts, above, padding) == (1, [2, 1, 0, 0], 0, 2)


def test_a_routing_map_of_another_width_is_refused_with_both_numbers() -> None:
    with pytest.raises(mt.ConfigError, match="5 columns; expected 4"):
        _count(torch.ones(2, 5, dtype=torch.bool), 4, top_k=2)


def test_counters_are_exact_beyond_the_range_of_float32() -> None:
    cells = new_cells(2, CPU)
    cells[1, 0] = 2**24
    count_choices(cells, _slot(), torch.tensor([[0]]), None, top_k=1, strict=True)
    assert cells[1, 0] == 2**24 + 1


@pytest.mark.parametrize("choices", [torch.zeros(6, 2, dtype=torch.int32), torch.zeros(6, 8, dtype=torch.bool)])
@pytest.mark.parametrize("valid", [None, torch.ones(2, 3)])
def test_nothing_on_the_hot_path_reads_the_device(choices: torch.Tensor, valid: torch.Tensor | None) -> None:
    # a meta tensor has no values: whatever would wait for one raises
    meta = torch.device("meta")
    cells = new_cells(8, meta)
    mask = None if valid is None else valid.to(meta)
    count_choices(cells, _slot(device=meta), choices.to(meta), mask, top_k=2, strict=True)
    assert cells.shape == (12, NUM_SLOTS)


def test_the_mask_of_a_call_with_a_cache_is_its_newest_part() -> None:
    past_and_new = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    cells = new_cells(2, CPU)
    count_choices(cells, _slot(), torch.tensor([[0], [1]]), past_and_new, top_k=1, strict=False)
    assert cells[:5, 0].tolist() == [0, 0, 1, 0, 1]


def test_a_stated_mask_that_does_not_fit_is_refused_with_both_shapes() -> None:
    with pytest.raises(mt.MaskError, match=r"\(5,\) does not fit a router call of 4 tokens"):
        _count(torch.zeros(4, 1, dtype=torch.int64), 2, torch.ones(5))


def test_a_found_mask_that_does_not_fit_is_reported_and_all_tokens_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cells = new_cells(2, CPU)
    count_choices(cells, _slot(), torch.zeros(4, 1, dtype=torch.int64), torch.ones(3, 3), top_k=1, strict=False)
    assert cells[1, 0] == 4
    assert "mask of shape (3, 3)" in caplog.text


def test_the_operator_passes_the_checks_of_torch_for_custom_operators() -> None:
    cells = new_cells(4, CPU)
    arguments = (cells, _slot(), torch.tensor([[0, 1]]), torch.tensor([True]), 2, True)
    torch.library.opcheck(torch.ops.moe_telemetry.count.default, arguments)

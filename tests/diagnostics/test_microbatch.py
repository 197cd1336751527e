"""MaxVio by microbatch, beside that of the window."""

from __future__ import annotations

import pytest
import torch

from moe_telemetry.diagnostics import microbatch_load
from moe_telemetry.diagnostics.microbatch import MICROBATCH_SCALE


def mean_violation(*loads: torch.Tensor) -> float:
    violation, calls = sum(loads).tolist()  # type: ignore[union-attr]
    return float(violation / MICROBATCH_SCALE / calls)


def test_microbatches_that_balance_each_other_are_not_balanced() -> None:
    first, second = torch.tensor([[0], [0]]), torch.tensor([[1], [1]])
    assert mean_violation(microbatch_load(first, 2), microbatch_load(second, 2)) == 1.0
    assert mean_violation(microbatch_load(torch.cat([first, second]), 2)) == 0.0


def test_known_counts() -> None:
    ids = torch.tensor([[1, 2], [1, 2], [1, 3], [2, 3]])
    assert mean_violation(microbatch_load(ids, 4)) == pytest.approx(0.5)


def test_padding_and_ids_out_of_range_are_not_counted() -> None:
    ids = torch.tensor([[0, 1], [1, -1], [0, 2], [0, 0]])
    valid = torch.tensor([True, True, True, False])
    assert mean_violation(microbatch_load(ids.to(torch.int16), 2, valid)) == 0.0


def test_an_empty_microbatch_is_no_microbatch() -> None:
    ids = torch.tensor([[0, 1]])
    assert microbatch_load(ids[:0], 2).tolist() == [0, 0]
    assert microbatch_load(ids, 2, torch.tensor([False])).tolist() == [0, 0]


def test_nothing_reads_the_device() -> None:
    ids = torch.zeros(6, 2, dtype=torch.int32, device="meta")
    assert microbatch_load(ids, 4, torch.ones(6, dtype=torch.bool, device="meta")).shape == (2,)

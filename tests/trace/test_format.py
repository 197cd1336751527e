"""The files of a trace: what they hold, in whatever program opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.format import part_name, schema_for, tensor_name, tensors_name
from moe_telemetry.trace.parts import table_of, whole_file, write_part
from moe_telemetry.trace.rows import TraceRow

KEY = RouterKey("decoder", 3)


def _row(ids: list[list[int]], **fields: Any) -> TraceRow:
    values: dict[str, Any] = {
        "step": 10,
        "microbatch": 0,
        "stage": "train",
        "key": KEY,
        "rank": 1,
        "num_tokens": len(ids),
        "top_k": 2,
        "is_sorted": False,
        "valid": None,
        "sequence_starts": np.zeros(1, np.int32),
    }
    return TraceRow(expert_ids=np.array(ids, np.int8).reshape(-1, 2), **{**values, **fields})


ROWS = [
    _row([[7, 2], [0, -1], [5, 5]], sequence_starts=np.array([0, 2], np.int32)),
    _row([[1, 0]], microbatch=1, stage="eval", num_tokens=9, valid=np.array([False]), is_sorted=True),
    _row([], step=11, num_tokens=4, sequence_starts=np.empty(0, np.int32)),
]
EXPECTED = [
    (10, 0, "train", "decoder", 3, 1, 3, 2, False, [7, 2, 0, -1, 5, 5], None, [0, 2]),
    (10, 1, "eval", "decoder", 3, 1, 9, 2, True, [1, 0], [False], [0]),
    (11, 0, "train", "decoder", 3, 1, 4, 2, False, [], None, []),
]


@pytest.fixture
def part(tmp_path: Path) -> Path:
    tensors = {tensor_name("scores", 10, 0, KEY): torch.randn(3, 8).t().to(torch.bfloat16)}
    size = write_part(tmp_path, 1, 0, ROWS, tensors, schema_for(8))
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir())
    return tmp_path / part_name(1, 0)


@pytest.mark.parametrize(
    ("num_experts", "kind"),
    [(8, "int8"), (128, "int8"), (129, "int16"), (2**15, "int16"), (2**15 + 1, "int32")],
)
def test_ids_are_of_the_narrowest_signed_type_that_holds_all_experts(num_experts: int, kind: str) -> None:
    assert str(schema_for(num_experts).field("expert_ids").type.value_type) == kind


def test_a_part_holds_the_rows_in_pyarrow(part: Path) -> None:
    table = pq.read_table(part)
    assert table.schema.equals(schema_for(8))
    assert list(zip(*table.to_pydict().values(), strict=True)) == EXPECTED


def test_a_part_holds_the_rows_in_pandas(part: Path) -> None:
    import pandas as pd

    frame = pd.read_parquet(part)
    assert frame["expert_ids"].map(list).tolist() == [row[9] for row in EXPECTED]
    assert frame["valid"].map(lambda value: None if value is None else list(value)).tolist() == [None, [False], None]
    assert frame["layer"].tolist() == [3, 3, 3]


def test_a_part_holds_the_rows_in_polars(part: Path) -> None:
    import polars as pl

    assert pl.read_parquet(part).rows() == EXPECTED


def test_a_part_holds_the_rows_in_duckdb(part: Path) -> None:
    import duckdb

    found = duckdb.sql(f"select * from read_parquet('{part}')").fetchall()
    assert found == EXPECTED
    (counts,) = duckdb.sql(
        f"select list(n order by e) from (select unnest(expert_ids) e, count(*) n from '{part}' group by e)"
    ).fetchall()
    assert counts == ([1, 2, 1, 1, 2, 1],)


def test_tensors_lie_beside_their_part_as_the_model_had_them(part: Path) -> None:
    (name,), (tensor,) = zip(*load_file(part.with_name(tensors_name(1, 0))).items(), strict=True)
    assert name == "scores/10/0/decoder.3"
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (8, 3))


def test_a_part_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    larger = schema_for(8).append(pa.field("more", pa.int8()))
    with pytest.raises(KeyError, match="more"):
        write_part(tmp_path, 0, 0, ROWS, {"scores/10/0/decoder.3": torch.zeros(1)}, larger)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_fails_half_way_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    with pytest.raises(IsADirectoryError):  # noqa: PT012  # what fails is inside
        with whole_file(path) as partial:
            partial.write_text("half")
            tmp_path.write_text("")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "before")]


def test_a_table_of_all_padding_free_calls_has_no_validity() -> None:
    table = table_of([ROWS[0], ROWS[2]], schema_for(300))
    assert table["valid"].null_count == 2
    assert str(table.schema.field("expert_ids").type.value_type) == "int16"
    assert table["expert_ids"].to_pylist()[0] == EXPECTED[0][9]

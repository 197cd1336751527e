"""The JSONL form: what scripts find in it, and what is read from files of others."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moe_telemetry as mt
from moe_telemetry.trace import jsonl
from moe_telemetry.trace.jsonl import read_jsonl, write_jsonl
from moe_telemetry.trace.rows import TraceRow


def _row(ids: Any, **fields: Any) -> TraceRow:
    array = np.asarray(ids, np.int8)
    values: dict[str, Any] = {
        "step": 10,
        "microbatch": 0,
        "stage": "train",
        "key": mt.RouterKey("decoder", 3),
        "rank": 0,
        "num_tokens": len(array),
        "top_k": array.shape[1],
        "is_sorted": False,
        "valid": None,
        "sequence_starts": np.zeros(1, np.int32),
    }
    return TraceRow(expert_ids=array, **{**values, **fields})


def _written(*rows: TraceRow) -> list[dict[str, Any]]:
    stream = io.StringIO()
    num_lines = write_jsonl(rows, stream)
    objects = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(objects) == num_lines
    return objects


def _read(*lines: str | dict[str, Any]) -> list[TraceRow]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return list(read_jsonl(io.StringIO("\n".join(texts))))


def test_an_object_has_these_keys_in_this_order() -> None:
    (found,) = _written(_row([[5, 1], [0, 2]]))
    assert list(found.items()) == [
        ("step", 10),
        ("stage", "train"),
        ("block", "decoder"),
        ("layer", 3),
        ("rank", 0),
        ("num_tokens", 2),
        ("topk", 2),
        ("top_indices", [[5, 1], [0, 2]]),
    ]


def test_the_microbatches_of_a_step_are_one_object_of_each_router_and_rank() -> None:
    other = mt.RouterKey("decoder", 4)
    calls = [
        _row([[0, 1]]),
        _row([[2, 3]], key=other),
        _row([[4, 5]], microbatch=1),
        _row([[6, 7]], microbatch=1, key=other),
        _row([[1, 0]], rank=1),
        _row([[3, 2]], step=11),
    ]
    assert [(each["step"], each["layer"], each["rank"], each["top_indices"]) for each in _written(*calls)] == [
        (10, 3, 0, [[0, 1], [4, 5]]),
        (10, 4, 0, [[2, 3], [6, 7]]),
        (10, 3, 1, [[1, 0]]),
        (11, 3, 0, [[3, 2]]),
    ]


def test_padding_and_choices_that_were_not_made_are_left_out() -> None:
    (found,) = _written(_row([[5, -1], [0, 2], [3, 1]], valid=np.array([True, False, True])))
    assert (found["num_tokens"], found["top_indices"]) == (2, [[5], [3, 1]])


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=3, max_size=3), min_size=1, max_size=5),
    st.integers(-(2**63), 2**63 - 1),
)
def test_what_is_written_is_read_back(ids: list[list[int]], step: int) -> None:
    stream = io.StringIO()
    row = _row(ids, step=step, stage='roll"out\u2028', key=mt.RouterKey("mtp0", 1), rank=7)
    write_jsonl([row], stream)
    (read,) = read_jsonl(io.StringIO(stream.getvalue()))
    assert (read.step, read.stage, read.key, read.rank, read.top_k) == (step, row.stage, row.key, 7, 3)
    assert (read.num_tokens, read.valid, read.sequence_starts.tolist()) == (len(ids), None, [0])
    assert np.issubdtype(read.expert_ids.dtype, np.signedinteger)
    assert read.expert_ids.tolist() == ids


def test_files_of_others_may_lack_keys_have_more_and_have_uneven_lists() -> None:
    (read,) = _read({"step": 1, "layer": 0, "top_indices": [[5], [3, 1], []], "logits": "beside", "time": 1.5})
    assert (read.stage, str(read.key), read.rank, read.top_k, read.num_tokens) == ("train", "decoder.0", 0, 2, 3)
    assert read.expert_ids.tolist() == [[5, -1], [3, 1], [-1, -1]]
    assert not read.is_sorted
    (wide,) = _read({"step": 1, "layer": 0, "topk": 3, "top_indices": [[1, 5]]})
    assert (wide.top_k, wide.expert_ids.tolist(), wide.is_sorted) == (3, [[1, 5, -1]], True)
    (empty,) = _read({"step": 1, "layer": 0, "topk": 2, "top_indices": []}, "", "  ")
    assert (empty.expert_ids.shape, empty.sequence_starts.tolist()) == ((0, 2), [])


def test_objects_of_one_step_and_router_are_microbatches() -> None:
    line = {"step": 1, "layer": 0, "top_indices": [[1]]}
    rows = _read(line, {**line, "rank": 1}, line, {**line, "layer": 1}, {**line, "step": 2})
    assert [(row.step, row.key.layer, row.rank, row.microbatch) for row in rows] == [
        (1, 0, 0, 0),
        (1, 0, 1, 0),
        (1, 0, 0, 1),
        (1, 1, 0, 0),
        (2, 0, 0, 0),
    ]


GOOD = '{"step": 1, "layer": 0, "top_indices": [[1, 2]]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1', "line 2: Expecting"),
        ("[" * 100_000, "line 2"),
        ("7", "line 2: expected a JSON object, found '7'"),
        ('{"layer": 0, "top_indices": []}', "'step' is None; expected a whole number"),
        ('{"step": 1.5, "layer": 0, "top_indices": []}', "'step' is 1.5"),
        ('{"step": true, "layer": 0, "top_indices": []}', "'step' is True"),
        ('{"step": 1, "layer": -1, "top_indices": []}', "'layer' is -1"),
        (
            '{"step": 1, "layer": 3000000000, "top_indices": []}',
            "'layer' is 3000000000; expected a whole number, 0 to",
        ),
        ('{"step": 1, "layer": 0, "rank": 1099511627776, "top_indices": []}', "'rank' is 1099511627776; expected"),
        ('{"step": 1, "layer": 0, "stage": "\\ud800", "top_indices": []}', "surrogates not allowed"),
        ('{"step": 1, "layer": 0, "stage": 3, "top_indices": []}', "'stage' is 3; expected a text"),
        ('{"step": 1, "layer": 0}', "'top_indices' is missing"),
        ('{"step": 1, "layer": 0, "top_indices": [1, 2]}', "no list of lists"),
        ('{"step": 1, "layer": 0, "top_indices": [[1.0]]}', "something else than whole numbers"),
        ('{"step": 1, "layer": 0, "top_indices": [["a"]]}', "something else than whole numbers"),
        ('{"step": 1, "layer": 0, "top_indices": [[null]]}', "something else than whole numbers"),
        ('{"step": 1, "layer": 0, "top_indices": [[[1]]]}', "something else than whole numbers"),
        ('{"step": 1, "layer": 0, "top_indices": [[[1], 2]]}', "something else than whole numbers"),
        ('{"step": 1, "layer": 0, "top_indices": [[36893488147419103232]]}', "something else than whole numbers"),
        ('{"step": 1, "layer": 0, "top_indices": [[-2]]}', "expert ids -2 to -2; expected -1 to 2147483647"),
        ('{"step": 1, "layer": 0, "top_indices": [[2147483648]]}', "expert ids 2147483648"),
        ('{"step": 1, "layer": 0, "topk": 1, "top_indices": [[1, 2]]}', "'topk' is 1; expected a whole number, 2 to"),
        ('{"step": 1, "layer": 0, "topk": 1000000000000, "top_indices": []}', "'topk' is 1000000000000"),
    ],
)
def test_a_line_that_is_no_call_is_named_with_its_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with path.open() as stream:
        rows = read_jsonl(stream)
        assert next(rows).expert_ids.tolist() == [[1, 2]]
        with pytest.raises(mt.TraceError, match=f"{path}, line 2: ") as caught:
            next(rows)
    assert caught.match(message)


def test_a_file_without_line_ends_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_CHARACTERS", 100)
    stream = io.StringIO("[" * 1000)
    with pytest.raises(mt.TraceError, match="the stream, line 1: longer than 100 characters"):
        list(read_jsonl(stream))
    assert stream.tell() == 101


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"PAR1\xff\xfe\n")
    with path.open(encoding="utf-8") as stream, pytest.raises(mt.TraceError, match="trace.jsonl, line 1 or soon after"):
        list(read_jsonl(stream))

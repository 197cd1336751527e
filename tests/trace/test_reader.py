"""Opening traces: manifests that agree, parts that are whole, ranks that are counted once, stores of any kind."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import moe_telemetry as mt
from moe_telemetry import RouterKey, TraceError
from moe_telemetry.analysis import concentration, predictability
from moe_telemetry.testing import make_trace
from moe_telemetry.testing.models import TinyMoe
from moe_telemetry.trace.jsonl_source import open_any_trace
from moe_telemetry.trace.reader import Part, Trace, open_trace


def _rows(trace: Trace) -> list[dict[str, object]]:
    return [row for chunk in trace.chunks() for batch in trace.batches(chunk) for row in batch.to_pylist()]


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of a folder in this process's memory."""
    yield "memory://traces/run"
    fsspec.filesystem("memory").store.clear()


def test_rows_come_by_step_whatever_part_and_rank_they_are_in(tmp_path: Path) -> None:
    make_trace(tmp_path, num_steps=5, steps_per_part=2, token_groups=(0, 1), num_microbatches=2)
    rows = _rows(open_trace(tmp_path))
    assert len(rows) == 5 * 3 * 2 * 2
    assert [row["step"] for row in rows] == sorted(step for step in range(5) for _ in range(12))
    assert {(row["step"], row["microbatch"], row["layer"], row["rank"]) for row in rows} == {
        (step, microbatch, layer, rank)
        for step in range(5)
        for microbatch in range(2)
        for layer in range(3)
        for rank in range(2)
    }


def test_ranks_with_the_same_tokens_are_read_once(tmp_path: Path) -> None:
    make_trace(tmp_path, num_tokens=4, top_k=1, num_steps=1, num_layers=1, token_groups=(0, 0))
    (row,) = _rows(open_trace(tmp_path))
    assert (row["rank"], len(row["expert_ids"])) == (0, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_a_folder_may_be_a_path_or_a_url(kind: str, tmp_path: Path, memory: str) -> None:
    folder = {"path": str(tmp_path), "file": f"file://{tmp_path}/", "memory": memory}[kind]
    make_trace(folder)
    make_trace(tmp_path / "same")
    assert _rows(open_trace(folder)) == _rows(open_trace(tmp_path / "same"))


def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    trace = open_trace(make_trace(tmp_path))
    assert next(trace.batches(trace.chunks()[0], ["layer", "step"])).schema.names == ["layer", "step"]


def test_batches_are_bounded_in_expert_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_telemetry.trace.reader.IDS_PER_BATCH", 300)
    trace = open_trace(make_trace(tmp_path, num_layers=9, num_tokens=64, top_k=2))
    (first, *_) = trace.chunks()
    batches = list(trace.batches(first))
    assert [batch.num_rows for batch in batches] == [2, 2, 2, 2, 1]
    assert sum(batch.num_rows for batch in batches) == first.num_rows


def test_ids_of_a_chunk_are_known_before_it_is_read(tmp_path: Path) -> None:
    trace = open_trace(make_trace(tmp_path, num_layers=2, num_tokens=10, top_k=3))
    assert {chunk.num_ids for chunk in trace.chunks()} == {2 * 10 * 3}


def test_files_of_a_killed_run_are_passed_over(tmp_path: Path) -> None:
    make_trace(tmp_path, is_complete=False)
    whole = _rows(open_trace(tmp_path))
    for name in ("routes-00000-000002.parquet.partial", "manifest-00000.json.partial", "notes.txt", "routes-x.parquet"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "folder").mkdir()
    trace = open_trace(tmp_path)
    assert _rows(trace) == whole
    assert trace.notes == ("ranks whose capture has not ended (killed, or still running): 0",)


def test_half_a_file_is_named(tmp_path: Path) -> None:
    make_trace(tmp_path)
    part = tmp_path / "routes-00000-000001.parquet"
    part.write_bytes(part.read_bytes()[:-40])
    with pytest.raises(
        TraceError, match=r"routes-00000-000001\.parquet is no whole Parquet file .*; copy it again, or"
    ):
        open_trace(tmp_path).chunks()


def test_a_file_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    make_trace(tmp_path)
    part = tmp_path / "routes-00000-000000.parquet"
    content = bytearray(part.read_bytes())
    content[4:200] = bytes(196)
    part.write_bytes(content)
    with pytest.raises(TraceError, match=r"routes-00000-000000\.parquet is no whole Parquet file"):
        _rows(open_trace(tmp_path))


def test_a_parquet_file_of_something_else_is_named(tmp_path: Path) -> None:
    make_trace(tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "routes-00000-000000.parquet")
    with pytest.raises(TraceError, match=r"000000\.parquet has no column 'step'; expected a part of a route trace"):
        open_trace(tmp_path).chunks()


def _rewrite(part: Path, name: str, kind: pa.DataType, *values: object) -> None:
    """Write a part again with a column of another kind, and with another value in all of its rows where given."""
    table = pq.read_table(part)
    column = pa.array([*values] * len(table) if values else table[name].to_pylist(), kind)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), part)


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("step", "a", pa.string(), "column 'step' is of string; expected int64"),
        ("step", 1.5, pa.float64(), "column 'step' is of double; expected int64"),
        ("step", None, pa.int64(), "a null in column 'step'"),
        ("stage", None, pa.string(), "a null in column 'stage'"),
        ("expert_ids", [255, 1], pa.list_(pa.uint8()), "column 'expert_ids' is of list<.*uint8"),
        ("expert_ids", [None, 1], pa.list_(pa.int8()), "a null in column 'expert_ids'"),
        ("valid", [1], pa.list_(pa.int8()), "column 'valid' is of list<.*; expected list<element: bool not null>"),
        ("sequence_starts", None, pa.list_(pa.int32()), "a null in column 'sequence_starts'"),
        ("top_k", 0, pa.int16(), "a row with top_k below 1"),
    ],
)
def test_columns_and_rows_of_another_kind_are_named(
    tmp_path: Path, name: str, value: object, kind: pa.DataType, message: str
) -> None:
    make_trace(tmp_path)
    _rewrite(tmp_path / "routes-00000-000000.parquet", name, kind, value)
    with pytest.raises(TraceError, match=f"routes-00000-000000.parquet.*{message}"):
        _rows(open_trace(tmp_path))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("step", pa.int32()),
        ("stage", pa.large_string()),
        ("block", pa.dictionary(pa.int32(), pa.string())),
        ("expert_ids", pa.large_list(pa.int64())),
        ("valid", pa.null()),
    ],
)
def test_a_part_that_another_program_wrote_again_is_the_same_trace(
    tmp_path: Path, name: str, kind: pa.DataType
) -> None:
    before = concentration(make_trace(tmp_path))
    _rewrite(tmp_path / "routes-00000-000000.parquet", name, kind)
    assert concentration(tmp_path) == before


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("{}/none", "none: no such folder; expected the folder that monitor.trace"),
        ("{}", r"has no manifest-\*\.json; expected the folder that monitor.trace"),
        ("nosuch://bucket/trace", "nosuch://bucket/trace: Protocol not known: nosuch"),
        ("memory://not/there", "memory://not/there: no such folder"),
        ("{}/file", "file is a file; expected the folder"),
    ],
)
def test_what_is_no_trace_is_refused(url: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match=message):
        open_trace(url.format(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "run-2"}, "has run 'run-1', manifest-00001.json has 'run-2'"),
        ({"num_experts": 32}, "has routers '3: decoder.0 E=16.*, manifest-00001.json has '3: decoder.0 E=32"),
        (
            {"hidden_size": 4},
            r"has captured tensors \(\), manifest-00001.json has \('hidden_states', 'router_weights'\)",
        ),
    ],
)
def test_two_jobs_in_one_folder_are_refused_by_what_differs(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    make_trace(tmp_path, token_groups=(0, 1))
    make_trace(tmp_path / "other", token_groups=(0, 1), **changes)  # type: ignore[arg-type]
    (tmp_path / "manifest-00001.json").write_bytes((tmp_path / "other" / "manifest-00001.json").read_bytes())
    with pytest.raises(TraceError, match=f"holds traces of two jobs: manifest-00000.json {message}"):
        open_trace(tmp_path)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    make_trace(tmp_path)
    (tmp_path / "manifest-00000.json").write_text("{")
    with pytest.raises(TraceError, match=r"manifest-00000\.json: not the manifest of a route trace"):
        open_trace(tmp_path)


def test_routes_whose_manifest_is_missing_are_an_error(tmp_path: Path) -> None:
    make_trace(tmp_path, token_groups=(0, 1))
    (tmp_path / "manifest-00001.json").unlink()
    with pytest.raises(TraceError, match=r"routes-00001-000000\.parquet and no manifest-00001\.json"):
        open_trace(tmp_path)


def test_a_rank_that_is_missing_altogether_is_said(tmp_path: Path) -> None:
    make_trace(tmp_path, token_groups=(0, 1, 2))
    for path in tmp_path.glob("*-00001*"):
        path.unlink()
    trace = open_trace(tmp_path)
    assert trace.notes == ("no manifest of ranks 1 of 3: tokens that they alone hold are not counted",)
    assert {row["rank"] for row in _rows(trace)} == {0, 2}


def test_a_manifest_under_the_name_of_another_rank_is_named(tmp_path: Path) -> None:
    make_trace(tmp_path, token_groups=(0, 1))
    (tmp_path / "manifest-00001.json").write_bytes((tmp_path / "manifest-00000.json").read_bytes())
    with pytest.raises(TraceError, match=r"manifest-00001\.json is of rank 0; expected manifest-00000\.json"):
        open_trace(tmp_path)


@pytest.mark.parametrize("lost", ["*-00000[-.]*", "routes-00000*"])
def test_of_ranks_with_the_same_tokens_one_is_read_though_the_first_was_not_traced(tmp_path: Path, lost: str) -> None:
    make_trace(tmp_path, token_groups=(0, 0, 2, 2))
    for path in tmp_path.glob(lost):
        path.unlink()
    assert {row["rank"] for row in _rows(open_trace(tmp_path))} == {1, 2}


def test_a_part_that_is_missing_between_others_is_said(tmp_path: Path) -> None:
    make_trace(tmp_path, num_steps=6)
    (tmp_path / "routes-00000-000001.parquet").unlink()
    trace = open_trace(tmp_path)
    assert trace.parts == (Part(0, 0), Part(0, 2))
    assert trace.notes == ("ranks with parts missing between others: 0",)


def test_the_files_of_a_real_capture_are_read_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyMoe()
    with mt.watch(model, routers=model.routers) as monitor, monitor.record() as recorded, monitor.trace(tmp_path):
        model(torch.randn(2, 5, 16))
        monitor.step(7)
    trace = open_trace(tmp_path)
    rows = [row for chunk in trace.chunks() for row in trace.rows(chunk)]
    assert trace.notes == ()
    assert [(row.step, row.key, row.num_tokens, row.top_k) for row in rows] == [
        (7, RouterKey("decoder", layer), 10, 2) for layer in range(2)
    ]
    for layer, row in enumerate(rows):
        np.testing.assert_array_equal(row.expert_ids, recorded.routes().ids[:, layer])
        assert row.sequence_starts.tolist() == [0, 5]
        assert row.valid is None


def test_json_lines_are_read_as_a_trace_once_their_experts_are_known(tmp_path: Path) -> None:
    lines = [{"step": step, "layer": layer, "top_indices": [[1, 2], [3]]} for step in range(2) for layer in (2, 10)]
    path = tmp_path / "routes.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(TraceError, match=r"do not say how many experts there are: give --num-experts"):
        open_any_trace(path)
    marked = tmp_path / "marked.jsonl.gz"
    marked.write_bytes(gzip.compress(path.read_text().encode("utf-8-sig")))
    for place in (path, f"file://{path}", marked):
        rows = _rows(open_any_trace(place, num_experts=4))
        assert [(row["step"], row["layer"], row["expert_ids"]) for row in rows] == [
            (step, layer, [1, 2, 3, -1]) for step in range(2) for layer in (2, 10)
        ]
    assert len(_rows(open_any_trace(tmp_path, num_experts=4))) == 8


def test_an_id_beyond_the_experts_of_json_lines_is_never_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    path.write_text('{"step": 0, "layer": 0, "top_indices": [[127, 128], [300, 2147483647]]}\n')
    (row,) = _rows(open_any_trace(path, num_experts=128))
    assert row["expert_ids"] == [127, 128, 300, 32767]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("nothing\n", r"routes\.jsonl, line 1: "), ('{"step": 1}\n', r"routes\.jsonl, line 1: ")],
)
def test_json_lines_that_cannot_be_read_are_named(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TraceError, match=message):
        _rows(open_any_trace(path, num_experts=4))


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b"{}" * 1000)[:20]])
def test_compressed_json_lines_that_are_damaged_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"routes\.jsonl\.gz, line 1 or soon after: no text: "):
        _rows(open_any_trace(path, num_experts=4))


def test_the_folder_of_a_trace_may_be_called_as_a_file_of_json_lines(tmp_path: Path) -> None:
    make_trace(tmp_path / "trace.jsonl")
    assert _rows(open_any_trace(tmp_path / "trace.jsonl"))


class _Distant(MemoryFileSystem):
    """As stores over a network may be: remembers what it has listed until told to forget, and lists no sizes."""

    protocol = "distant"
    listed: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("distant://", "memory://")))

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:  # noqa: FBT002  # as fsspec has it
        if path not in self.listed:
            self.listed[path] = [{**entry, "size": None} for entry in super().ls(path, detail)]
        return self.listed[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed.pop(path or "", None)


@pytest.fixture
def distant(memory: str) -> str:
    """The URL of the same folder, as if it were on another machine."""
    fsspec.register_implementation("distant", _Distant, clobber=True)
    return memory.replace("memory://", "distant://")


def test_a_trace_that_grows_is_seen_to_grow(memory: str, distant: str) -> None:
    for num_steps in (2, 4):
        make_trace(memory, num_steps=num_steps)
        assert len({row["step"] for row in _rows(open_trace(distant))}) == num_steps


def test_sizes_that_a_listing_does_not_say_are_asked_for(memory: str, distant: str) -> None:
    make_trace(memory, hidden_size=4)
    assert predictability(distant).pairs == predictability(memory).pairs

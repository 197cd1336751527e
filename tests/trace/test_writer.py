"""The writer's thread: parts that end, disks that are slow, full or gone, and runs that are killed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import moe_telemetry as mt
from moe_telemetry import tracing
from moe_telemetry.testing.models import TinyMoe
from moe_telemetry.trace import writer
from moe_telemetry.trace.manifest import Manifest
from tests.disks import files_limited_to

FIRST = "routes-00000-000000.parquet"


@pytest.fixture
def monitor() -> Iterator[mt.Monitor]:
    model = TinyMoe()
    with mt.watch(model, routers=model.routers) as monitor:
        yield monitor


def _steps(monitor: mt.Monitor, *steps: int, num_tokens: int = 6) -> None:
    for step in steps:
        for layer in range(2):
            monitor.observe(layer, torch.arange(2 * num_tokens).view(-1, 2) % 8)
        monitor.step(step)


def _found(folder: Path) -> list[int]:
    """Return the step of every row that is there, part by part."""
    return [
        step for path in sorted(folder.glob("routes-*.parquet")) for step in pq.read_table(path)["step"].to_pylist()
    ]


def _manifest(folder: Path) -> Manifest:
    return Manifest.from_json((folder / "manifest-00000.json").read_text())


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)


def test_a_part_ends_by_its_size(monitor: mt.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_BYTES", 3 * 12)
    with monitor.trace(tmp_path / "trace"):
        _steps(monitor, 1, 2, 3, 4)
    parts = [pq.read_metadata(path).num_rows for path in sorted((tmp_path / "trace").glob("*.parquet"))]
    assert parts == [3, 3, 2]
    assert _found(tmp_path / "trace") == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_part_ends_by_its_age_though_nothing_comes_any_more(
    monitor: mt.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_SECONDS", 0.05)
    with monitor.trace(tmp_path):
        _steps(monitor, 1)
        _wait_for(tmp_path / FIRST)
        assert not _manifest(tmp_path).is_complete
    assert _found(tmp_path) == [1, 1]
    assert _manifest(tmp_path).is_complete


def test_what_a_full_disk_does_not_take_is_counted_and_writing_goes_on_when_it_can(
    monitor: mt.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "PART_SECONDS", 0.0)
    with monitor.trace(tmp_path) as trace:
        with files_limited_to(1500):
            _steps(monitor, 1, 2)
            deadline = time.monotonic() + 60
            while trace.left_out.calls_failed < 4:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        _steps(monitor, 3)
    assert _found(tmp_path) == [3, 3]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".partial") == []
    assert _manifest(tmp_path).left_out == trace.left_out
    assert trace.left_out.calls_failed == 4
    # one line for all failures, one at the end
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "router calls are lost so far" in caplog.messages[0]
    assert caplog.messages[1].endswith("2 router calls in 2 parts, 0.0 MB; left out: calls failed: 4")


def test_a_folder_that_is_removed_is_made_again(
    monitor: mt.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_SECONDS", 0.0)
    folder = tmp_path / "trace"
    with monitor.trace(folder):
        _steps(monitor, 1)
        _wait_for(folder / "routes-00000-000001.parquet")
        shutil.rmtree(folder)
        _steps(monitor, 2)
    assert _found(folder) == [2, 2]
    assert _manifest(folder).is_complete


def _let_go(pipe: Path) -> None:
    """Let the thread go on that waits for a reader of this pipe, or soon will; what it writes there is lost."""
    while pipe.is_fifo():
        os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
        time.sleep(0.01)


def test_a_disk_that_blocks_loses_calls_and_never_holds_up_a_step(
    monitor: mt.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_SECONDS", 0.0)
    monkeypatch.setattr(tracing, "WAITING_BYTES", 10 * 12)
    # whoever opens a pipe for writing waits for a reader
    pipe = tmp_path / f"{FIRST}.partial"
    os.mkfifo(pipe)
    with monitor.trace(tmp_path) as trace:
        _steps(monitor, *range(1, 9))
        assert trace.left_out.calls_behind == 16 - 10
        _let_go(pipe)
        deadline = time.monotonic() + 60
        while _found(tmp_path)[-1:] != [5]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        _steps(monitor, 9)
    # the call that went into the pipe is lost; room was there again for step 9
    assert trace.left_out.calls_failed == 1
    assert _found(tmp_path) == [1, 2, 2, 3, 3, 4, 4, 5, 5, 9, 9]
    assert _manifest(tmp_path).left_out == trace.left_out


def test_closing_does_not_wait_for_ever_for_a_disk_that_blocks(
    monitor: mt.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_CLOSE_SECONDS", 0.05)
    pipe = tmp_path / f"{FIRST}.partial"
    os.mkfifo(pipe)
    trace = monitor.trace(tmp_path)
    _steps(monitor, 1)
    trace.close()
    assert "the disk did not take the last calls within 0.05 s" in caplog.text
    _let_go(pipe)


def test_a_step_number_that_comes_twice_keeps_both_steps_tensors(monitor: mt.Monitor, tmp_path: Path) -> None:
    with monitor.trace(tmp_path, scores=True):
        for step in (5, 4, 5):
            monitor.observe(0, [[1, 2]], scores=torch.full((1, 8), float(step)))
            monitor.step(step)
    assert _found(tmp_path) == [5, 4, 5]
    assert len(list(tmp_path.glob("tensors-*"))) == 2


def test_the_last_line_says_what_was_written(
    monitor: mt.Monitor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), monitor.trace(tmp_path):
        _steps(monitor, 1)
    assert caplog.records[-1].levelname == "INFO"
    assert caplog.messages[-1].startswith(f"moe_telemetry: trace {tmp_path}: 2 router calls in 1 parts, ")
    assert caplog.messages[-1].endswith("left out: nothing")


CHILD = """
import sys, torch, moe_telemetry as mt
from moe_telemetry.testing.models import TinyMoe
from moe_telemetry.trace import writer
writer.PART_SECONDS = float(sys.argv[2])
model = TinyMoe()
trace = mt.watch(model, routers=model.routers, run="child").trace(sys.argv[1], scores=True)
"""


def _child(folder: Path, part_seconds: float, script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD + script, str(folder), str(part_seconds)])


def test_a_run_that_is_killed_leaves_whole_parts_and_nothing_else_that_counts(tmp_path: Path) -> None:
    forever = "step = 0\nwhile True:\n    model(torch.randn(64, 64, 16))\n"
    child = _child(tmp_path, 0.001, forever + "    step += 1\n    trace.end_step(step)\n")
    try:
        _wait_for(tmp_path / "routes-00000-000020.parquet")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    names = {path.name for path in tmp_path.glob("routes-*.parquet")}
    assert names == {f"routes-00000-{number:06d}.parquet" for number in range(len(names))}
    steps = _found(tmp_path)
    assert len(steps) >= 21
    # every call of two layers, in order, without a gap
    assert steps == [number // 2 + 1 for number in range(len(steps))]
    assert {len(path.name) for path in tmp_path.glob("*.parquet")} == {len(FIRST)}
    for path in tmp_path.glob("tensors-*.safetensors"):
        from safetensors.torch import load_file

        assert load_file(path)
    assert not _manifest(tmp_path).is_complete


TWO_TRACES = """
import time
from pathlib import Path
write = writer.write_part
def write_slowly(folder, *rest):
    time.sleep(2.0 if folder.name == "first" else 0.0)
    return write(folder, *rest)
writer.write_part = write_slowly
model = TinyMoe()
monitor = mt.watch(model, routers=model.routers)
for step, name in enumerate(("first", "second")):
    monitor.trace(Path(sys.argv[1], name), max_steps=1)
    model(torch.randn(2, 3, 16))
    monitor.step(step)
"""


def test_a_process_that_ends_waits_for_traces_that_ended_by_themselves(tmp_path: Path) -> None:
    assert _child(tmp_path, 100.0, TWO_TRACES).wait(120) == 0
    assert [_found(tmp_path / name) for name in ("first", "second")] == [[0, 0], [1, 1]]


def test_a_process_that_ends_without_a_close_writes_what_it_has(tmp_path: Path) -> None:
    # nobody holds the monitor, and nobody has called step()
    child = _child(tmp_path, 100.0, "model(torch.randn(2, 3, 16)); trace.end_step(7); model(torch.randn(2, 3, 16))")
    assert child.wait(120) == 0
    assert _found(tmp_path) == [7, 7, 1, 1]
    assert _manifest(tmp_path).is_complete

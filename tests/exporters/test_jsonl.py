"""JsonlExporter: one line a snapshot, whole whatever happens to the run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_telemetry import Snapshot, SnapshotError
from moe_telemetry.delivery import Delivery
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.jsonl import JsonlExporter
from tests.disks import files_limited_to, wait_for


def _read(path: Path) -> list[Snapshot]:
    return [Snapshot.from_json(line) for line in path.read_bytes().splitlines()]


def test_each_snapshot_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "run.jsonl"
    snapshots = [make_snapshot(step=step, labels={"team": 'a"b\nc,é'}) for step in (10, 20)]
    exporter = JsonlExporter(path)
    for snapshot in snapshots:
        exporter.export(snapshot)
    exporter.close()
    assert _read(path) == snapshots


def test_a_line_is_in_the_file_when_export_returns(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    exporter = JsonlExporter(path)
    exporter.export(make_snapshot())
    assert _read(path) == [make_snapshot()]
    exporter.close()


def test_a_second_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for step in (10, 20):
        exporter = JsonlExporter(path)
        exporter.export(make_snapshot(step=step))
        exporter.close()
    assert [snapshot.step for snapshot in _read(path)] == [10, 20]


def test_a_line_cut_by_a_kill_stays_the_only_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = make_snapshot().to_json()
    path.write_text(f"{whole}\n{whole[:100]}", encoding="utf-8")
    exporter = JsonlExporter(path)
    exporter.export(make_snapshot(step=20))
    exporter.close()
    first, cut, last = path.read_bytes().splitlines()
    assert Snapshot.from_json(first).step == 10
    assert Snapshot.from_json(last).step == 20
    with pytest.raises(SnapshotError, match="not a snapshot"):
        Snapshot.from_json(cut)


def test_what_was_exported_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = (
        "import os, signal\n"
        "from moe_telemetry.testing import make_snapshot\n"
        "from moe_telemetry_exporters.jsonl import JsonlExporter\n"
        f"JsonlExporter({str(path)!r}).export(make_snapshot())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert _read(path) == [make_snapshot()]


def test_a_folder_that_cannot_be_made_fails_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        JsonlExporter(tmp_path / "file" / "run.jsonl").start()


def test_a_full_disk_is_an_error_of_that_export_and_no_half_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    exporter = JsonlExporter(path)
    exporter.export(make_snapshot(step=10))
    with files_limited_to(path.stat().st_size + 100), pytest.raises(OSError, match="File too large"):
        exporter.export(make_snapshot(step=20))
    assert _read(path) == [make_snapshot(step=10)]
    exporter.export(make_snapshot(step=30))
    exporter.close()
    assert _read(path) == [make_snapshot(step=10), make_snapshot(step=30)]


def test_a_monitor_counts_the_lines_that_found_no_room(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    delivery = Delivery([("jsonl", JsonlExporter(path))])
    with files_limited_to(100):
        for step in (10, 20):
            delivery.put(make_snapshot(step=step))
        wait_for(lambda: delivery.errors == {"jsonl": 2})
    delivery.put(make_snapshot(step=30))
    delivery.close(30)
    assert delivery.errors == {"jsonl": 2}
    assert _read(path) == [make_snapshot(step=30)]


def test_a_device_without_room_is_an_error_each_time(tmp_path: Path) -> None:
    exporter = JsonlExporter("/dev/full")
    for step in (10, 20):
        with pytest.raises(OSError, match="No space left"):
            exporter.export(make_snapshot(step=step))
    exporter.close()


def test_a_file_that_is_removed_or_moved_away_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.jsonl"
    exporter = JsonlExporter(path)
    exporter.export(make_snapshot(step=10))
    path.rename(tmp_path / "rotated.jsonl")
    exporter.export(make_snapshot(step=20))
    shutil.rmtree(path.parent)
    exporter.export(make_snapshot(step=30))
    exporter.close()
    assert _read(tmp_path / "rotated.jsonl") == [make_snapshot(step=10)]
    assert _read(path) == [make_snapshot(step=30)]


def test_lines_can_go_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        exporter = JsonlExporter(pipe)
        exporter.export(make_snapshot())
        exporter.close()
        received = reader.communicate()[0]
    assert Snapshot.from_json(received) == make_snapshot()

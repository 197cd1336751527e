"""PrometheusTextfileExporter: one file a node, whole at every moment, and left behind when the run ends."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from moe_telemetry import ConfigError, ExporterError
from moe_telemetry.plugins import Exporter, exporter_scope, resolve_exporter
from moe_telemetry.testing import ExporterContract, make_snapshot
from moe_telemetry_exporters.prometheus.text import TextRenderer
from moe_telemetry_exporters.prometheus.textfile import PrometheusTextfileExporter


class TestTextfile(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:
        return PrometheusTextfileExporter(directory=tmp_path)


def test_the_file_is_the_text_of_the_last_snapshot_without_timestamps(tmp_path: Path) -> None:
    exporter = PrometheusTextfileExporter(directory=tmp_path)
    exporter.start()
    for step in (10, 20):
        exporter.export(snapshot := make_snapshot(step=step, node=1, num_nodes=2))
    assert [*tmp_path.iterdir()] == [exporter.path]
    text = exporter.path.read_bytes()
    assert text == TextRenderer().render(snapshot, openmetrics=False)
    values = [line.rpartition("} ")[2] for line in text.decode().splitlines() if not line.startswith("#")]
    assert all(len(value.split()) == 1 for value in values)


def test_the_file_stays_when_the_run_ends_and_says_so(tmp_path: Path) -> None:
    exporter = PrometheusTextfileExporter(directory=tmp_path)
    exporter.start()
    last = make_snapshot()
    exporter.export(replace(last, health=replace(last.health, run_finished=True)))
    exporter.close()
    assert b'moe_telemetry_run_finished{run="run-1"} 1.0\n' in exporter.path.read_bytes()
    exporter.start()
    exporter.export(make_snapshot(run="run-2"))
    assert b"run-1" not in exporter.path.read_bytes()
    assert [*tmp_path.iterdir()] == [exporter.path]


def test_where_asked_the_file_goes_when_the_run_ends(tmp_path: Path) -> None:
    exporter = PrometheusTextfileExporter(directory=tmp_path, remove_at_close=True)
    exporter.path.write_text("of an earlier run", encoding="utf-8")
    exporter.close()
    assert exporter.path.exists(), "it was not ours"
    exporter.export(make_snapshot())
    exporter.close()
    assert [*tmp_path.iterdir()] == []


def test_a_reader_sees_a_whole_file_at_every_moment(tmp_path: Path) -> None:
    exporter = PrometheusTextfileExporter(directory=tmp_path)
    snapshots = [make_snapshot(step=10), make_snapshot(step=20, num_layers=40, num_experts=64, per_expert=True)]
    texts = {TextRenderer().render(snapshot, openmetrics=False) for snapshot in snapshots}
    exporter.export(snapshots[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for snapshot in snapshots:
                exporter.export(snapshot)

    writer = threading.Thread(target=write)
    writer.start()
    reads: list[bytes] = []
    while len(reads) < 300 or len(set(reads)) < 2:
        reads.append(exporter.path.read_bytes())
    stop.set()
    writer.join()
    assert set(reads) == texts


def test_node_exporter_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        exporter = PrometheusTextfileExporter(directory=tmp_path)
        exporter.export(make_snapshot())
    finally:
        os.umask(before)
    assert stat.S_IMODE(exporter.path.stat().st_mode) == 0o644


def test_a_write_that_fails_is_raised_and_leaves_the_file_before(tmp_path: Path) -> None:
    exporter = PrometheusTextfileExporter(directory=tmp_path)
    exporter.path.mkdir()
    with pytest.raises(OSError, match="directory"):
        exporter.export(make_snapshot())
    assert [*tmp_path.iterdir()] == [exporter.path]
    exporter.path.rmdir()
    exporter.export(make_snapshot())
    tmp_path.rename(tmp_path.with_name("moved"))
    with pytest.raises(FileNotFoundError):
        exporter.export(make_snapshot())


def test_a_directory_that_is_not_there_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    for directory in (tmp_path / "missing", Path(__file__)):
        with pytest.raises(ExporterError, match="textfile.directory.*MOE_TELEMETRY_TEXTFILE_DIRECTORY"):
            PrometheusTextfileExporter(directory=directory).start()


@pytest.mark.parametrize("filename", ["metrics.txt", "a/b.prom", "../x.prom", "", ".prom/"])
def test_a_name_that_the_collector_would_not_read_is_refused(filename: str) -> None:
    with pytest.raises(ConfigError, match=r"filename=.*ends in \.prom"):
        PrometheusTextfileExporter(filename=filename)


def test_it_is_found_by_name_and_used_once_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOE_TELEMETRY_TEXTFILE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("MOE_TELEMETRY_TEXTFILE_FILENAME", "mine.prom")
    name, exporter = resolve_exporter("textfile")
    assert isinstance(exporter, PrometheusTextfileExporter)
    assert (name, exporter.path, exporter_scope(exporter)) == ("textfile", tmp_path / "mine.prom", "node")


@pytest.mark.stack
def test_promtool_finds_nothing_wrong(promtool: str, tmp_path: Path) -> None:
    exporter = PrometheusTextfileExporter(directory=tmp_path)
    exporter.export(make_snapshot(stages=("train", "eval"), per_expert=True, labels={"team": 'a"b\\c\nd'}))
    done = subprocess.run(
        [promtool, "check", "metrics"], input=exporter.path.read_bytes(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

"""Every exporter of this package passes the contract that authors of others are given."""
# ruff: noqa: ARG002  # not every exporter writes to a folder

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from moe_telemetry.plugins import Exporter, exporter_scope
from moe_telemetry.testing import ExporterContract, RecordingExporter, make_snapshot
from moe_telemetry_exporters.console import ConsoleExporter
from moe_telemetry_exporters.jsonl import JsonlExporter
from moe_telemetry_exporters.prometheus import PrometheusExporter
from moe_telemetry_exporters.tensorboard import TensorBoardExporter


class TestConsole(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:
        return ConsoleExporter(stream=io.StringIO())


class TestConsoleOnATerminal(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:
        return ConsoleExporter(console=Console(file=io.StringIO(), force_terminal=True, width=100, height=30))


class TestJsonl(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:
        return JsonlExporter(tmp_path / "folder" / "snapshots.jsonl")


class TestPrometheus(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:
        return PrometheusExporter(port=0)


class TestPrometheusInARegistry(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:
        return PrometheusExporter(registry=CollectorRegistry(auto_describe=True))


class TestTensorBoard(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:
        return TensorBoardExporter(tmp_path / "runs")


class TestRecording(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:
        return RecordingExporter()


def test_only_prometheus_has_an_endpoint_a_node() -> None:
    scopes = {
        exporter_scope(exporter)
        for exporter in (ConsoleExporter(), JsonlExporter(), TensorBoardExporter(), RecordingExporter())
    }
    assert scopes == {"job"}
    assert exporter_scope(PrometheusExporter()) == "node"


def test_the_contract_catches_an_exporter_that_writes_when_it_is_made(tmp_path: Path) -> None:
    class Hasty(RecordingExporter):
        def __init__(self, path: Path) -> None:
            super().__init__()
            path.touch()

    class HastyContract(ExporterContract):
        def make_exporter(self, tmp_path: Path) -> Exporter:
            return Hasty(tmp_path / "file")

    with pytest.raises(AssertionError):
        HastyContract().test_making_one_only_keeps_settings(tmp_path)


def test_the_recording_exporter_keeps_what_it_is_given() -> None:
    exporter = RecordingExporter()
    exporter.start()
    exporter.export(snapshot := make_snapshot())
    exporter.close()
    assert (exporter.snapshots, exporter.num_starts, exporter.num_closes) == ([snapshot], 1, 1)


def test_exporters_and_their_test_tools_need_neither_torch_nor_pytest() -> None:
    code = (
        "import sys, moe_telemetry.testing as testing; testing.ExporterContract; testing.make_snapshot()\n"
        "from moe_telemetry_exporters import console, jsonl, prometheus, tensorboard\n"
        "print(sorted({'torch', 'pytest', 'numpy.testing'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""What tests of exporters share: real programs, where they are installed, and an endpoint that is up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from moe_telemetry_exporters.prometheus import PrometheusExporter
from tests.exporters.prometheus_endpoint import SMALL, threads


@pytest.fixture
def promtool() -> str:
    return _program("promtool")


@pytest.fixture
def prometheus() -> str:
    return _program("prometheus")


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    """A Prometheus exporter whose endpoint shows a small snapshot, and that leaves no thread behind."""
    exporter = PrometheusExporter(port=0)
    exporter.start()
    exporter.export(SMALL)
    yield exporter
    exporter.close()
    assert threads() == []


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None and os.environ.get("CI"):
        pytest.fail(f"{name} is not installed, and CI is set")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path

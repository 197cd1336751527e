"""Receivers of both protocols, and an exporter to each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from moe_telemetry import Snapshot
from moe_telemetry_exporters.otel import OtelExporter
from tests.stack.otlp_receivers import PROTOCOLS, Received, receiver


@pytest.fixture(autouse=True)
def _no_variables_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*os.environ,):
        if variable.startswith("OTEL_"):
            monkeypatch.delenv(variable)


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sink(protocol: str) -> Iterator[tuple[Received, str]]:
    with receiver(protocol) as found:
        yield found


@pytest.fixture
def export(protocol: str, sink: tuple[Received, str]) -> Callable[..., Received]:
    """Exports snapshots by a new exporter, and returns what the receiver has then."""
    received, url = sink

    def run(*snapshots: Snapshot, **settings: object) -> Received:
        exporter = OtelExporter(endpoint=url, protocol=protocol, **settings)  # type: ignore[arg-type]
        exporter.start()
        for snapshot in snapshots:
            exporter.export(snapshot)
        exporter.close()
        return received

    return run

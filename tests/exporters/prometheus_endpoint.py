"""An endpoint of the tests' own, and clients of it."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

from moe_telemetry import Snapshot
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter

LARGE = make_snapshot(num_layers=20, num_experts=64, per_expert=True)
FILES = Path("/proc/self/fd")
SMALL = make_snapshot(num_layers=1, num_experts=4)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("moe-telemetry")]


def port_of(exporter: PrometheusExporter) -> int:
    assert exporter.url is not None
    return int(exporter.url.split(":")[2].split("/")[0])


def connect(exporter: PrometheusExporter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(exporter)), timeout=30)


def get(exporter: PrometheusExporter, path: str = "/metrics") -> bytes:
    return get_from(port_of(exporter), path)


def get_from(port: int, path: str = "/metrics") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        body: bytes = response.read()
    return body


def finished(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, health=replace(snapshot.health, run_finished=True))


def wait_until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

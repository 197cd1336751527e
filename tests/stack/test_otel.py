"""A program that watches a model and ends without a close: receivers by HTTP and gRPC have its last counts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moe_telemetry import Snapshot
from tests.exporters.otel.snapshots import TOKENS, expected_series
from tests.stack.otlp_receivers import Received, receiver
from tests.stack.processes import child_environment, free_port

PROGRAM = """
import json, sys, time
import torch
import moe_telemetry as mt
from moe_telemetry.testing import TinyMoe
from moe_telemetry_exporters.jsonl import JsonlExporter
from moe_telemetry_exporters.otel import OtelExporter

urls, path = json.loads(sys.argv[1]), sys.argv[2]
exporters = [OtelExporter(endpoint=url, protocol=protocol) for protocol, url in urls]
model = TinyMoe()
settings = {"routers": model.routers, "every_n_steps": 2, "per_expert": True, "labels": {"team": "a"}}
monitor = mt.watch(model, *exporters, JsonlExporter(path), **settings)
for step in range(1, 6):
    model(torch.randn(2, 8, 16))
    monitor.step(step)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Received, Received, Snapshot, str]:
    """What receivers by gRPC and HTTP have, the last snapshot, and the program's log; a third receiver is down."""
    path = tmp_path_factory.mktemp("otel") / "snapshots.jsonl"
    with receiver("grpc") as (by_grpc, grpc_url), receiver("http/protobuf") as (by_http, http_url):
        down = f"http://127.0.0.1:{free_port()}"
        urls = [("grpc", grpc_url), ("http/protobuf", http_url), ("grpc", down), ("http/protobuf", down)]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(urls), str(path)],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    snapshot = Snapshot.from_json(path.read_bytes().splitlines()[-1])
    return by_grpc, by_http, snapshot, done.stderr


def test_both_receivers_have_what_the_last_snapshot_says(run: tuple[Received, Received, Snapshot, str]) -> None:
    *receivers, snapshot, _ = run
    for received in receivers:
        assert {key: received.values()[key] for key in expected_series(snapshot)} == expected_series(snapshot)
        assert received.points("moe.telemetry.run.finished")[-1].as_double == 1
        # five steps of 16 tokens: the last, after the last step that reduced, came with the end of the program
        assert received.points(TOKENS)[-1].as_int == 80


def test_receivers_that_are_down_cost_the_program_nothing_but_a_line_in_its_log(
    run: tuple[Received, Received, Snapshot, str],
) -> None:
    log = run[-1]
    for name in ("OtelExporter-3", "OtelExporter-4"):
        (line,) = [line for line in log.splitlines() if f"exporter {name} failed to export" in line]
        assert "did not take the metrics" in line
    assert "Traceback" not in log
    assert "in time" not in log  # each let go within the time that a close has

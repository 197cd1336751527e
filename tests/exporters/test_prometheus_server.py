"""A real Prometheus scrapes the endpoints of a job of two nodes."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter

pytestmark = pytest.mark.stack


@pytest.fixture
def nodes() -> Iterator[list[PrometheusExporter]]:
    exporters = [PrometheusExporter(port=0), PrometheusExporter(port=0)]
    for node, exporter in enumerate(exporters):
        exporter.start()
        exporter.export(make_snapshot(step=30, node=node, num_nodes=2, per_expert=True, labels={"team": 'a"b\\c\nd,é'}))
    yield exporters
    for exporter in exporters:
        exporter.close()


@pytest.fixture
def api(prometheus: str, nodes: list[PrometheusExporter], tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes both nodes every second."""
    targets = [exporter.url.split("/")[2] for exporter in nodes if exporter.url]
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "moe", "static_configs": [{"targets": targets}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    yield f"http://{address}"
    server.terminate()
    server.wait(30)


def _query(api: str, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
    url = f"{api}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(url, timeout=10) as response:
        result = json.load(response)["data"]["result"]
    return {tuple(sorted(series["metric"].items())): float(series["value"][1]) for series in result}


def _wait_until(api: str, expression: str, expected: float) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if _query(api, expression).get(()) == expected:
                return
        except (urllib.error.URLError, ConnectionError):
            pass  # not up yet
        time.sleep(0.3)
    pytest.fail(f"{expression} did not become {expected} within a minute")


def test_sums_over_both_nodes_are_the_totals_of_the_job(api: str) -> None:
    job = make_snapshot(step=30, per_expert=True)
    _wait_until(api, "sum(up)", 2)
    _wait_until(api, "count(moe_telemetry_step)", 2)
    for name in ("moe_router_tokens_total", "moe_router_assignments_total", "moe_expert_assignments_total"):
        total = sum(sample.value for sample in job.samples() if sample.name == name)
        assert _query(api, f"sum({name})") == {(): total}
    assert _query(api, "count(moe_load_cv_ratio)") == {(): 3}
    assert _query(api, "count by (team) (moe_telemetry_step)") == {(("team", 'a"b\\c\nd,é'),): 2}
    assert set(_query(api, "scrape_samples_scraped").values()) == {
        float(len(list(make_snapshot(step=30, node=node, num_nodes=2, per_expert=True).samples("node"))))
        for node in (0, 1)
    }

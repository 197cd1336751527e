"""A real Prometheus scrapes with certificates and passwords, is refused without, and reads odd text back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.endpoint.server import MetricsServer, Reply, Request
from moe_telemetry_exporters.prometheus import PrometheusExporter
from moe_telemetry_exporters.prometheus.text import TextRenderer
from tests.stack.processes import wait_until
from tests.stack.prometheus_server import Prometheus, prometheus_running, scraping

pytestmark = pytest.mark.stack

PASSWORD = "pass:word étoile"
ODD = 'q"b\\s\n\r\t\0{e}=100%s,é漢🙂 \x7f\\n'
REFUSED = {
    "tls_as_http": "malformed|EOF|400|reset",
    "tls_untrusted": "certificate signed by unknown authority",
    "mutual_without": "certificate required|bad certificate|EOF|reset",
    "basic_without": "401",
    "basic_wrong": "401",
    "all_without_password": "401",
}
ANSWERED = ("plain", "odd_text", "tls", "mutual", "basic", "all", "filtered")


@pytest.fixture(scope="module")
def exporters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Endpoints by name, and the port of each."""
    folder = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca"))
    _write(authority.issue_cert("127.0.0.1"), folder, "server")
    _write(authority.issue_cert("prometheus"), folder, "client")
    tls = {"certfile": folder / "server.pem", "keyfile": folder / "server.key"}
    mutual = {**tls, "client_cafile": folder / "ca"}
    basic = {"username": "prometheus", "password": PASSWORD}
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "tls": tls,
        "mutual": mutual,
        "basic": basic,
        "all": {**mutual, **basic},
    }
    with ExitStack() as stack:
        opened = {name: PrometheusExporter(port=0, **kwargs) for name, kwargs in settings.items()}
        for name, exporter in opened.items():
            stack.callback(exporter.close)
            exporter.start()
            exporter.export(make_snapshot(run=ODD if name == "plain" else name, labels={"team": ODD}))
        yield {"folder": folder, **opened}


def _write(certificate: Any, folder: Path, name: str) -> None:
    (folder / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    (folder / f"{name}.key").write_bytes(certificate.private_key_pem.bytes())


@pytest.fixture(scope="module")
def server(exporters: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = exporters["folder"]
    ports = {name: [int(it.url.split(":")[2].split("/")[0])] for name, it in exporters.items() if name != "folder"}
    trust = {"ca_file": str(folder / "ca")}
    client = {**trust, "cert_file": str(folder / "client.pem"), "key_file": str(folder / "client.key")}
    basic = {"username": "prometheus", "password": PASSWORD}
    https = {"scheme": "https"}
    text = MetricsServer("127.0.0.1", 0, {"/metrics": _plain_text})
    jobs: dict[str, dict[str, Any]] = {
        "plain": {"ports": ports["plain"]},
        "odd_text": {"ports": [text.port]},
        "tls": {"ports": ports["tls"], **https, "tls_config": trust},
        "mutual": {"ports": ports["mutual"], **https, "tls_config": client},
        "basic": {"ports": ports["basic"], "basic_auth": basic},
        "all": {"ports": ports["all"], **https, "tls_config": client, "basic_auth": basic},
        "filtered": {"ports": ports["plain"], "params": {"name[]": ["moe_telemetry_step", "moe_expert_relative_load"]}},
        "tls_as_http": {"ports": ports["tls"]},
        "tls_untrusted": {"ports": ports["tls"], **https},
        "mutual_without": {"ports": ports["mutual"], **https, "tls_config": trust},
        "basic_without": {"ports": ports["basic"]},
        "basic_wrong": {"ports": ports["basic"], "basic_auth": {**basic, "password": "wrong"}},
        "all_without_password": {"ports": ports["all"], **https, "tls_config": client},
    }
    with prometheus_running(scraping(jobs), tmp_path_factory.mktemp("access")) as running:
        wait_until(lambda: len(running.scrape_errors()) == len(jobs), "every job has been scraped")
        yield running
    text.close()


def _plain_text(_: Request) -> Reply:
    text = TextRenderer().render(make_snapshot(run=ODD, labels={"team": ODD}), openmetrics=False)
    return Reply("text/plain; version=0.0.4; charset=utf-8", text)


def test_prometheus_is_answered_with_what_each_endpoint_asks_for(server: Prometheus) -> None:
    errors = server.scrape_errors()
    assert {job: errors[job] for job in ANSWERED} == dict.fromkeys(ANSWERED, "")


@pytest.mark.parametrize("job", REFUSED)
def test_prometheus_is_refused_without(server: Prometheus, job: str) -> None:
    assert re.search(REFUSED[job], server.scrape_errors()[job])
    assert server.query(f'up{{job="{job}"}}') == {(): 0}
    assert server.query(f'count({{job="{job}", __name__=~"moe_.*"}})') == {}


def test_odd_text_is_read_back_from_openmetrics_and_from_plain_text(server: Prometheus) -> None:
    for job in ("plain", "odd_text"):
        assert server.query(f'moe_telemetry_step{{job="{job}"}}', "run", "team") == {(ODD, ODD): 10}


def test_every_sample_of_the_snapshot_is_there_in_both_formats(server: Prometheus) -> None:
    expected = len(list(make_snapshot().samples("node")))
    for job in ("plain", "odd_text", "all"):
        assert server.query(f'count({{job="{job}", __name__=~"moe_.*"}})') == {(): expected}


def test_a_scrape_may_take_some_metrics_and_whole_histograms(server: Prometheus) -> None:
    names = server.query('count by (__name__) ({job="filtered", __name__=~"moe_.*"})', "__name__")
    assert {name for (name,) in names} == {
        "moe_telemetry_step",
        "moe_expert_relative_load_bucket",
        "moe_expert_relative_load_sum",
        "moe_expert_relative_load_count",
    }
    # OpenMetrics and plain text write bounds alike
    assert (
        server.query('count by (le) ({job="filtered", le=~".+"})', "le").keys()
        == server.query('count by (le) ({job="odd_text", le=~".+"})', "le").keys()
    )


def test_series_of_layers_that_are_gone_are_gone(server: Prometheus, exporters: dict[str, Any]) -> None:
    query = 'moe_load_cv_ratio{job="basic"}'
    wait_until(lambda: server.query(query, "layer").keys() == {("0",), ("1",), ("2",)}, "three layers")
    exporters["basic"].export(make_snapshot(run="basic", first_layer=2, num_layers=2, step=20))
    server.wait_for('moe_telemetry_step{job="basic"} == 20', 20)
    assert server.query(query, "layer").keys() == {("2",), ("3",)}

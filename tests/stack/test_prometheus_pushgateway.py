"""A real Pushgateway, behind TLS and a password, keeps what short jobs leave, and a real Prometheus scrapes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from moe_telemetry import ExporterError
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus.pushgateway import PushgatewayExporter
from tests.stack.prometheus_server import Prometheus, prometheus_running, pushgateway_running, scraping

pytestmark = pytest.mark.stack

PASSWORD = "push secret"
_BCRYPT = "$2b$04$.IesA1UtU2ArkOV8T4tzsO12jemnDmysluBDKwX1aSCKzEsGymPUu"
ODD = 'a/b "c" \\ é漢🙂 100%\n'


@dataclass(frozen=True)
class Gateway:
    port: int
    cafile: Path
    server: Prometheus

    def exporter(self, **settings: Any) -> PushgatewayExporter:
        ours = {"cafile": self.cafile, "username": "moe", "password": PASSWORD, "interval_seconds": 0}
        exporter = PushgatewayExporter(**{"url": f"https://localhost:{self.port}", **ours, **settings})
        exporter.start()
        return exporter


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("pushgateway")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    (folder / "web.yml").write_text(
        f"tls_server_config: {{cert_file: server.pem, key_file: server.pem}}\nbasic_auth_users: {{moe: '{_BCRYPT}'}}\n",
        encoding="utf-8",
    )
    with pushgateway_running(folder, [f"--web.config.file={folder / 'web.yml'}"]) as port:
        job = {
            "ports": [port],
            "honor_labels": True,
            "scheme": "https",
            "tls_config": {"ca_file": str(folder / "ca.pem")},
            "basic_auth": {"username": "moe", "password": PASSWORD},
        }
        with prometheus_running(scraping({"pushgateway": job}), folder) as server:
            yield Gateway(port, folder / "ca.pem", server)


def test_a_job_that_is_over_before_a_scrape_is_scraped(gateway: Gateway) -> None:
    exporter = gateway.exporter(job="short", instance=ODD)
    last = make_snapshot(run=ODD, labels={"team": ODD}, per_expert=True)
    exporter.export(replace(last, health=replace(last.health, run_finished=True)))
    exporter.close()
    gateway.server.wait_for('count(moe_telemetry_run_finished{job="short"} == 1)', 1)
    query = 'moe_telemetry_step{job="short"}'
    assert gateway.server.query(query, "instance", "run", "team") == {(ODD, ODD, ODD): 10}
    found = gateway.server.query('count({job="short", __name__=~"moe_.*"})')
    assert found == {(): len(list(last.samples("node")))}


def test_nodes_add_up_and_neither_overwrites_the_other(gateway: Gateway) -> None:
    for node in (0, 1):
        gateway.exporter(job="nodes", instance=f"node{node}").export(make_snapshot(node=node, num_nodes=2))
    gateway.server.wait_for('count(moe_telemetry_step{job="nodes"})', 2)
    total = sum(sample.value for sample in make_snapshot().samples() if sample.name == "moe_router_tokens_total")
    assert gateway.server.query('sum(moe_router_tokens_total{job="nodes"})') == {(): total}


def test_the_next_run_of_a_node_takes_the_place_of_the_one_before_unless_runs_have_groups(gateway: Gateway) -> None:
    for run in ("first", "second"):
        gateway.exporter(job="replaced", instance="a").export(make_snapshot(run=run, num_layers=5))
        gateway.exporter(job="kept", instance="a", group_by_run=True).export(make_snapshot(run=run))
    gateway.server.wait_for('count(moe_telemetry_step{job="kept"})', 2)
    assert gateway.server.query('moe_telemetry_step{job="replaced"}', "run") == {("second",): 10}
    assert gateway.server.query('moe_telemetry_step{job="kept"}', "run").keys() == {("first",), ("second",)}


def test_series_of_layers_that_are_gone_are_gone(gateway: Gateway) -> None:
    exporter = gateway.exporter(job="layers", instance="a")
    exporter.export(make_snapshot(num_layers=3))
    exporter.export(make_snapshot(first_layer=2, num_layers=2, step=20))
    gateway.server.wait_for('max(moe_telemetry_step{job="layers"})', 20)
    assert gateway.server.query('moe_load_cv_ratio{job="layers"}', "layer").keys() == {("2",), ("3",)}


def test_a_group_that_is_deleted_at_the_end_is_gone(gateway: Gateway) -> None:
    exporter = gateway.exporter(job="deleted", instance="a", delete_at_close=True)
    exporter.export(make_snapshot())
    gateway.server.wait_for('count(moe_telemetry_step{job="deleted"})', 1)
    exporter.close()
    gateway.server.wait_for('count(absent(moe_telemetry_step{job="deleted"}))', 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"password": "wrong"}, "answers 401"),
        ({"username": None, "password": None}, "answers 401"),
        ({"cafile": None}, "certificate verify failed"),
        ({"url": "http://localhost:{port}"}, "answers 400|reset|Broken pipe"),
        ({"url": "https://localhost:{port}/wrong"}, "answers 404"),
    ],
)
def test_what_the_gateway_refuses_is_an_error(gateway: Gateway, settings: dict[str, Any], message: str) -> None:
    if "url" in settings:
        settings = {"url": settings["url"].format(port=gateway.port)}
    with pytest.raises(ExporterError, match=message) as caught:
        gateway.exporter(job="refused", **settings).export(make_snapshot())
    assert PASSWORD not in str(caught.value)

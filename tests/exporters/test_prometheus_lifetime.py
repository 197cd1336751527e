"""The endpoint through many scrapes, and while it closes."""

from __future__ import annotations

import gc
import http.client
import socket
import sys
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace

import pytest

from moe_telemetry import ExporterError
from moe_telemetry.delivery import Delivery
from moe_telemetry.testing import RecordingExporter, make_snapshot
from moe_telemetry_exporters.endpoint import server as endpoint_server
from moe_telemetry_exporters.endpoint.server import MetricsServer, Reply, Request
from moe_telemetry_exporters.prometheus import PrometheusExporter
from moe_telemetry_exporters.prometheus.text import TextRenderer
from tests.exporters.prometheus_endpoint import (
    FILES,
    LARGE,
    SMALL,
    connect,
    get_from,
    port_of,
    threads,
    wait_until,
)

# many scrapes


def test_ten_thousand_scrapes_leave_nothing_behind(exporter: PrometheusExporter) -> None:
    def scrape(count: int, client: socket.socket, request: bytes, length: int) -> None:
        for number in range(count):
            exporter.export(replace(SMALL, step=10_000 + number))
            client.sendall(request)
            received = 0
            while received < length:
                received += len(client.recv(65536))
            assert received == length

    def scrape_often(num_kept_alive: int, num_closed: int) -> None:
        exporter.export(replace(SMALL, step=10_000))
        with connect(exporter) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
            length = len(b"".join(iter(lambda: client.recv(65536), b"")))
        with connect(exporter) as client:
            kept = length - len(b"Connection: close\r\n")
            scrape(num_kept_alive, client, b"GET /metrics HTTP/1.1\r\n\r\n", kept)
        for _ in range(num_closed):
            with connect(exporter) as client:
                scrape(1, client, b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n", length)

    def used() -> tuple[int, int, int]:
        wait_until(lambda: "moe-telemetry-scrape" not in threads())
        gc.collect()
        return len(threads()), len([*FILES.iterdir()]), sys.getallocatedblocks()

    scrape_often(100, 100)
    num_threads, num_files, blocks = used()
    scrape_often(7500, 2500)
    num_threads_after, num_files_after, blocks_after = used()
    assert (num_threads_after, num_files_after) == (num_threads, num_files)
    assert blocks_after - blocks < 2000  # a fifth of a block a scrape would be a leak


# its end


def test_a_scrape_while_the_endpoint_closes_is_whole_or_a_connection_error() -> None:
    expected = TextRenderer().render(LARGE, openmetrics=False)
    for _ in range(5):
        exporter = PrometheusExporter(port=0)
        exporter.start()
        exporter.export(LARGE)
        bodies: list[bytes] = []
        clients = [threading.Thread(target=_hammer, args=(port_of(exporter), bodies)) for _ in range(6)]
        for client in clients:
            client.start()
        wait_until(lambda bodies=bodies: len(bodies) > 10)
        exporter.close()
        assert threads() == []
        for client in clients:
            client.join()
        assert set(bodies) == {expected}


def _hammer(port: int, bodies: list[bytes]) -> None:
    """Scrape until the endpoint is gone; any error other than that of a connection is one of the test."""
    with suppress(urllib.error.URLError, ConnectionError, http.client.HTTPException):
        while True:
            bodies.append(get_from(port))


def test_a_request_under_way_is_answered_when_the_endpoint_closes() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def route(_: Request) -> Reply:
        begun.set()
        go_on.wait(30)
        return Reply("text/plain", b"whole")

    server = MetricsServer("127.0.0.1", 0, {"/": route})
    answers: list[bytes] = []
    client = threading.Thread(target=lambda: answers.append(get_from(server.port, "/")))
    client.start()
    begun.wait(30)
    closer = threading.Thread(target=server.close)
    closer.start()
    wait_until(lambda: server.is_closing)
    go_on.set()
    closer.join()
    client.join()
    assert answers == [b"whole"]


def test_close_does_not_wait_for_a_route_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_server, "_GRACE_SECONDS", 0.1)
    begun, go_on = threading.Event(), threading.Event()

    def route(_: Request) -> Reply:
        begun.set()
        go_on.wait()
        return Reply("text/plain", b"")

    server = MetricsServer("127.0.0.1", 0, {"/": route})
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        begun.wait(30)
        server.close()
        assert client.recv(1) == b""
    go_on.set()
    wait_until(lambda: threads() == [])


def test_a_taken_port_costs_one_warning_and_the_other_sinks_go_on(
    exporter: PrometheusExporter, caplog: pytest.LogCaptureFixture
) -> None:
    other = RecordingExporter()
    delivery = Delivery([("prometheus", PrometheusExporter(port=port_of(exporter))), ("other", other)])
    for step in range(3):
        delivery.put(make_snapshot(step=step))
    delivery.close(30)
    assert len(other.snapshots) == 3
    assert delivery.errors == {"prometheus": 1, "other": 0}
    assert ["Address already in use" in record.message for record in caplog.records] == [True]


def test_where_asked_the_next_free_port_is_taken_and_said(
    exporter: PrometheusExporter, caplog: pytest.LogCaptureFixture
) -> None:
    taken = port_of(exporter)
    second = PrometheusExporter(port=taken, port_tries=50)
    second.start()
    assert taken < port_of(second) < taken + 50
    assert caplog.messages == [f"moe_telemetry: port {taken} is taken; the endpoint is at port {port_of(second)}"]
    second.close()
    with pytest.raises(ExporterError, match=rf"{taken}: Address"):
        PrometheusExporter(port=taken, port_tries=1).start()


def test_a_metric_of_the_users_own_that_has_our_name_is_one_error() -> None:
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    Gauge("moe_telemetry_step", "The user's own.", registry=registry).set(7)
    exporter = PrometheusExporter(registry=registry)
    with pytest.raises(ExporterError, match=r"has metrics of these names already: .*moe_telemetry_step"):
        exporter.start()
    exporter.export(SMALL)
    exporter.close()
    assert b"\nmoe_telemetry_step 7.0\n" in generate_latest(registry)

"""The endpoint's routes, and what clients that do harm can do to it: nothing."""

from __future__ import annotations

import http.client
import os
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace

import pytest

from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.endpoint import connection
from moe_telemetry_exporters.endpoint.server import MetricsServer, Reply, Request
from moe_telemetry_exporters.prometheus import PrometheusExporter
from tests.exporters.prometheus_endpoint import (
    FILES,
    SMALL,
    connect,
    get,
    get_from,
    port_of,
    threads,
    wait_until,
)

# routes


def test_a_route_gets_the_request_and_its_reply_is_sent() -> None:
    seen: list[Request] = []
    sent: list[str] = []

    def route(request: Request) -> Reply:
        seen.append(request)
        return Reply("text/x-echo", b"hello", {"X-More": "yes"}, on_sent=lambda: sent.append("sent"))

    server = MetricsServer("127.0.0.1", 0, {"/echo": route})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    answers: list[tuple[object, ...]] = []
    for method in ("GET", "HEAD"):
        connection.request(method, "/echo?a=1&a=2&b=", headers={"x-asked": "this"})
        with connection.getresponse() as response:
            answers.append((response.status, response.getheader("content-type"), response.getheader("content-length")))
            answers.append((response.getheader("x-more"), response.read()))
    connection.close()
    server.close()
    assert answers == [(200, "text/x-echo", "5"), ("yes", b"hello"), (200, "text/x-echo", "5"), ("yes", b"")]
    assert sent == ["sent"]
    assert [(request.path, dict(request.query)) for request in seen] == [("/echo", {"a": ["1", "2"], "b": [""]})] * 2
    assert (seen[0].headers["X-Asked"], seen[0].client) == ("this", "127.0.0.1")


def test_a_path_that_is_not_there_names_those_that_are(exporter: PrometheusExporter) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(exporter, "/metric")
    with caught.value as error:
        assert (error.code, error.read()) == (
            404,
            b"404 nothing is here; the paths of this endpoint are /, /live.json, /metrics\n",
        )


def test_a_route_that_fails_is_an_error_for_the_client_and_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def route(_: Request) -> Reply:
        raise KeyError("secret")

    server = MetricsServer("127.0.0.1", 0, {"/": route})
    for _ in range(3):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get_from(server.port, "/")
        with caught.value as error:
            assert (error.code, error.read()) == (500, b"500 KeyError: see the log of the run\n")
    server.close()
    assert [record.message for record in caplog.records] == ["moe_telemetry: the endpoint cannot answer /"]


@pytest.mark.parametrize("name", ["moe_expert_relative_load", "moe_expert_relative_load_sum"])
def test_a_histogram_asked_for_by_name_comes_whole(exporter: PrometheusExporter, name: str) -> None:
    lines = get(exporter, f"/metrics?name[]={name}").decode().splitlines()
    names = {line.split("{")[0] for line in lines if not line.startswith("#")}
    assert names == {f"moe_expert_relative_load{part}" for part in ("_bucket", "_sum", "_count")}


def test_a_counter_may_be_asked_for_by_its_name_in_openmetrics(exporter: PrometheusExporter) -> None:
    assert get(exporter, "/metrics?name[]=moe_router_tokens") == get(
        exporter, "/metrics?name[]=moe_router_tokens_total"
    )
    assert get(exporter, "/metrics?name[]=nothing") == b""


def test_a_run_id_that_is_no_unicode_does_not_take_the_endpoint_down(exporter: PrometheusExporter) -> None:
    exporter.export(replace(SMALL, run=os.fsdecode(b"run-\xff")))
    assert b'run="run-?"' in get(exporter)


def test_series_that_were_cut_are_counted_at_the_endpoint(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot(num_layers=2, num_experts=64, per_expert=True, max_series=150))
    lines = [line for line in get(exporter).decode().splitlines() if not line.startswith("#")]
    experts = sum(line.startswith("moe_expert_assignments_total") for line in lines)
    assert len(lines) == 150
    assert f'moe_telemetry_series_dropped_total{{run="run-1"}} {128 - experts}' in lines


# clients that do harm


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x00" * 1000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /metrics HTTP/1.1\r\nContent-Length: nonsense\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"BREW /pot HTTP/1.1\r\n\r\n",
        b"PUT /metrics HTTP/1.1\r\nContent-Length: 10\r\n\r\n0123456789",
        b"GET /metrics?%ff%00[]=\xff HTTP/1.1\r\nAccept: \xff;q=\xff\r\nAuthorization: \xff\r\n\r\n",
    ],
    ids=range(13),
)
def test_garbage_harms_nobody(exporter: PrometheusExporter, sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with connect(exporter) as client, suppress(ConnectionError):
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):
            pass
    with connect(exporter) as client:
        client.sendall(sent)
    assert b"moe_telemetry_step" in get(exporter)
    assert capfd.readouterr() == ("", "")


def test_a_body_that_nobody_reads_is_not_taken_for_a_request(exporter: PrometheusExporter) -> None:
    with connect(exporter) as client:
        smuggled = b"GET /live.json HTTP/1.1\r\n\r\n"
        client.sendall(b"GET /metrics HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(smuggled), smuggled))
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200") == 1


def test_a_request_that_is_too_slow_or_too_long_is_ended(
    exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_REQUEST_SECONDS", 0.3)
    with connect(exporter) as client, suppress(ConnectionError):
        for letter in b"GET /metrics HTTP/1.1":
            time.sleep(0.05)
            client.sendall(bytes([letter]))
        assert client.recv(1) == b""
    monkeypatch.setattr(connection, "_REQUEST_SECONDS", 1e6)
    with connect(exporter) as client, suppress(ConnectionError):
        client.sendall(b"GET /metrics HTTP/1.1\r\n" + (b"X: " + b"y" * 60_000 + b"\r\n") * 3)
        assert client.recv(1) == b""


def test_a_connection_without_a_next_request_is_ended(
    exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_IDLE_SECONDS", 0.1)
    with connect(exporter) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"".join(iter(lambda: client.recv(65536), b"")).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_given_up(exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_REPLY_SECONDS", 0.1)
    exporter.export(make_snapshot(num_layers=61, num_experts=256, per_expert=True))
    with connect(exporter) as client:
        for _ in range(10):
            with suppress(ConnectionError):
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        wait_until(lambda: "moe-telemetry-scrape" not in threads())


def test_many_idle_connections_take_neither_the_files_of_the_process_nor_the_place_of_a_scrape(
    exporter: PrometheusExporter,
) -> None:
    clients = [connect(exporter) for _ in range(200)]
    assert b"moe_telemetry_step" in get(exporter)
    wait_until(lambda: threads().count("moe-telemetry-scrape") <= 64)
    for client in clients:
        client.close()


def test_a_process_without_files_left_serves_again_when_there_are_some(exporter: PrometheusExporter) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    client.settimeout(30)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(path.name) for path in FILES.iterdir()) + 1, hard))
    held = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        client.connect(("127.0.0.1", port_of(exporter)))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        time.sleep(0.3)
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with client:
        assert client.recv(15).startswith(b"HTTP/1.1 200")

"""The endpoint under clients that do harm, many scrapes, forks and its own end."""

from __future__ import annotations

import gc
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from moe_telemetry import ExporterError, Snapshot
from moe_telemetry.delivery import Delivery
from moe_telemetry.testing import RecordingExporter, make_snapshot
from moe_telemetry_exporters import prometheus_connection, prometheus_linger, prometheus_server
from moe_telemetry_exporters.prometheus import PrometheusExporter
from moe_telemetry_exporters.prometheus_server import MetricsServer, Reply, Request
from moe_telemetry_exporters.prometheus_text import TextRenderer

LARGE = make_snapshot(num_layers=20, num_experts=64, per_expert=True)
FILES = Path("/proc/self/fd")
SMALL = make_snapshot(num_layers=1, num_experts=4)


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter(port=0)
    exporter.start()
    exporter.export(SMALL)
    yield exporter
    exporter.close()
    assert _threads() == []


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("moe-telemetry")]


def _port(exporter: PrometheusExporter) -> int:
    assert exporter.url is not None
    return int(exporter.url.split(":")[2].split("/")[0])


def _connect(exporter: PrometheusExporter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", _port(exporter)), timeout=30)


def _get(exporter: PrometheusExporter, path: str = "/metrics") -> bytes:
    return _get_from(_port(exporter), path)


def _get_from(port: int, path: str = "/metrics") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        body: bytes = response.read()
    return body


def _finished(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, health=replace(snapshot.health, run_finished=True))


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
        _get(exporter, "/metric")
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
            _get_from(server.port, "/")
        with caught.value as error:
            assert (error.code, error.read()) == (500, b"500 KeyError: see the log of the run\n")
    server.close()
    assert [record.message for record in caplog.records] == ["moe_telemetry: the endpoint cannot answer /"]


@pytest.mark.parametrize("name", ["moe_expert_relative_load", "moe_expert_relative_load_sum"])
def test_a_histogram_asked_for_by_name_comes_whole(exporter: PrometheusExporter, name: str) -> None:
    lines = _get(exporter, f"/metrics?name[]={name}").decode().splitlines()
    names = {line.split("{")[0] for line in lines if not line.startswith("#")}
    assert names == {f"moe_expert_relative_load{part}" for part in ("_bucket", "_sum", "_count")}


def test_a_counter_may_be_asked_for_by_its_name_in_openmetrics(exporter: PrometheusExporter) -> None:
    assert _get(exporter, "/metrics?name[]=moe_router_tokens") == _get(
        exporter, "/metrics?name[]=moe_router_tokens_total"
    )
    assert _get(exporter, "/metrics?name[]=nothing") == b""


def test_a_run_id_that_is_no_unicode_does_not_take_the_endpoint_down(exporter: PrometheusExporter) -> None:
    exporter.export(replace(SMALL, run=os.fsdecode(b"run-\xff")))
    assert b'run="run-?"' in _get(exporter)


def test_series_that_were_cut_are_counted_at_the_endpoint(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot(num_layers=2, num_experts=64, per_expert=True, max_series=150))
    lines = [line for line in _get(exporter).decode().splitlines() if not line.startswith("#")]
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
    with _connect(exporter) as client, suppress(ConnectionError):
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):
            pass
    with _connect(exporter) as client:
        client.sendall(sent)
    assert b"moe_telemetry_step" in _get(exporter)
    assert capfd.readouterr() == ("", "")


def test_a_body_that_nobody_reads_is_not_taken_for_a_request(exporter: PrometheusExporter) -> None:
    with _connect(exporter) as client:
        smuggled = b"GET /live.json HTTP/1.1\r\n\r\n"
        client.sendall(b"GET /metrics HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(smuggled), smuggled))
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200") == 1


def test_a_request_that_is_too_slow_or_too_long_is_ended(
    exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_connection, "_REQUEST_SECONDS", 0.3)
    with _connect(exporter) as client, suppress(ConnectionError):
        for letter in b"GET /metrics HTTP/1.1":
            time.sleep(0.05)
            client.sendall(bytes([letter]))
        assert client.recv(1) == b""
    monkeypatch.setattr(prometheus_connection, "_REQUEST_SECONDS", 1e6)
    with _connect(exporter) as client, suppress(ConnectionError):
        client.sendall(b"GET /metrics HTTP/1.1\r\n" + (b"X: " + b"y" * 60_000 + b"\r\n") * 3)
        assert client.recv(1) == b""


def test_a_connection_without_a_next_request_is_ended(
    exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_connection, "_IDLE_SECONDS", 0.1)
    with _connect(exporter) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"".join(iter(lambda: client.recv(65536), b"")).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_given_up(exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_connection, "_REPLY_SECONDS", 0.1)
    exporter.export(make_snapshot(num_layers=61, num_experts=256, per_expert=True))
    with _connect(exporter) as client:
        for _ in range(10):
            with suppress(ConnectionError):
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        _wait_until(lambda: "moe-telemetry-scrape" not in _threads())


def test_many_idle_connections_take_neither_the_files_of_the_process_nor_the_place_of_a_scrape(
    exporter: PrometheusExporter,
) -> None:
    clients = [_connect(exporter) for _ in range(200)]
    assert b"moe_telemetry_step" in _get(exporter)
    _wait_until(lambda: _threads().count("moe-telemetry-scrape") <= 64)
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
        client.connect(("127.0.0.1", _port(exporter)))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        time.sleep(0.3)
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with client:
        assert client.recv(15).startswith(b"HTTP/1.1 200")


# many scrapes


def _wait_until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
        with _connect(exporter) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
            length = len(b"".join(iter(lambda: client.recv(65536), b"")))
        with _connect(exporter) as client:
            kept = length - len(b"Connection: close\r\n")
            scrape(num_kept_alive, client, b"GET /metrics HTTP/1.1\r\n\r\n", kept)
        for _ in range(num_closed):
            with _connect(exporter) as client:
                scrape(1, client, b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n", length)

    def used() -> tuple[int, int, int]:
        _wait_until(lambda: "moe-telemetry-scrape" not in _threads())
        gc.collect()
        return len(_threads()), len([*FILES.iterdir()]), sys.getallocatedblocks()

    scrape_often(100, 100)
    threads, files, blocks = used()
    scrape_often(7500, 2500)
    threads_after, files_after, blocks_after = used()
    assert (threads_after, files_after) == (threads, files)
    assert blocks_after - blocks < 2000  # a fifth of a block a scrape would be a leak


# its end


def test_a_scrape_while_the_endpoint_closes_is_whole_or_a_connection_error() -> None:
    expected = TextRenderer().render(LARGE, openmetrics=False)
    for _ in range(5):
        exporter = PrometheusExporter(port=0)
        exporter.start()
        exporter.export(LARGE)
        bodies: list[bytes] = []
        clients = [threading.Thread(target=_hammer, args=(_port(exporter), bodies)) for _ in range(6)]
        for client in clients:
            client.start()
        _wait_until(lambda bodies=bodies: len(bodies) > 10)
        exporter.close()
        assert _threads() == []
        for client in clients:
            client.join()
        assert set(bodies) == {expected}


def _hammer(port: int, bodies: list[bytes]) -> None:
    """Scrape until the endpoint is gone; any error other than that of a connection is one of the test."""
    with suppress(urllib.error.URLError, ConnectionError, http.client.HTTPException):
        while True:
            bodies.append(_get_from(port))


def test_a_request_under_way_is_answered_when_the_endpoint_closes() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def route(_: Request) -> Reply:
        begun.set()
        go_on.wait(30)
        return Reply("text/plain", b"whole")

    server = MetricsServer("127.0.0.1", 0, {"/": route})
    answers: list[bytes] = []
    client = threading.Thread(target=lambda: answers.append(_get_from(server.port, "/")))
    client.start()
    begun.wait(30)
    closer = threading.Thread(target=server.close)
    closer.start()
    _wait_until(lambda: server.is_closing)
    go_on.set()
    closer.join()
    client.join()
    assert answers == [b"whole"]


def test_close_does_not_wait_for_a_route_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_server, "_GRACE_SECONDS", 0.1)
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
    _wait_until(lambda: _threads() == [])


def test_a_taken_port_costs_one_warning_and_the_other_sinks_go_on(
    exporter: PrometheusExporter, caplog: pytest.LogCaptureFixture
) -> None:
    other = RecordingExporter()
    delivery = Delivery([("prometheus", PrometheusExporter(port=_port(exporter))), ("other", other)])
    for step in range(3):
        delivery.put(make_snapshot(step=step))
    delivery.close(30)
    assert len(other.snapshots) == 3
    assert delivery.errors == {"prometheus": 1, "other": 0}
    assert ["Address already in use" in record.message for record in caplog.records] == [True]


def test_where_asked_the_next_free_port_is_taken_and_said(
    exporter: PrometheusExporter, caplog: pytest.LogCaptureFixture
) -> None:
    taken = _port(exporter)
    second = PrometheusExporter(port=taken, port_tries=50)
    second.start()
    assert taken < _port(second) < taken + 50
    assert caplog.messages == [f"moe_telemetry: port {taken} is taken; the endpoint is at port {_port(second)}"]
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


# after the end


def test_without_lingering_the_port_is_free_at_once(exporter: PrometheusExporter) -> None:
    port = _port(exporter)
    exporter.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        _get_from(port)


def _lingering(seconds: float = 1e6) -> tuple[PrometheusExporter, int]:
    exporter = PrometheusExporter(port=0, linger_seconds=seconds)
    exporter.start()
    exporter.export(SMALL)
    port = _port(exporter)
    return exporter, port


def test_an_endpoint_lingers_until_its_scraper_has_seen_the_end() -> None:
    exporter, port = _lingering()
    assert b'moe_telemetry_run_finished{run="run-1"} 0' in _get_from(port)
    exporter.export(_finished(SMALL))
    exporter.close()
    exporter.close()
    assert exporter.url is None
    _get_from(port, "/live.json")  # no scrape
    _get_from(port, "/metrics?name[]=moe_telemetry_step")  # no whole one
    assert b'moe_telemetry_run_finished{run="run-1"} 1' in _get_from(port)
    _wait_until(lambda: _threads() == [])
    with pytest.raises(urllib.error.URLError, match="refused"):
        _get_from(port)


def test_an_endpoint_that_nobody_has_scraped_yet_lingers_for_a_first_scrape() -> None:
    exporter, port = _lingering()
    exporter.export(_finished(SMALL))
    exporter.close()
    assert b"run_finished" in _get_from(port)
    _wait_until(lambda: _threads() == [])


def test_an_endpoint_lingers_no_longer_than_asked() -> None:
    exporter, _ = _lingering(0.05)
    exporter.export(_finished(SMALL))
    exporter.close()
    _wait_until(lambda: _threads() == [])


def test_everybody_who_scrapes_is_waited_for() -> None:
    audience = prometheus_linger.Audience()
    audience.scraped("10.0.0.1", finished=False)
    audience.scraped("10.0.0.2", finished=False)
    audience.scraped("10.0.0.1", finished=True)
    waiter = threading.Thread(target=audience.wait, args=(1e6, threading.Event()))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    audience.scraped("10.0.0.2", finished=True)
    waiter.join()


def test_the_next_run_of_a_process_takes_the_port_of_one_that_lingers() -> None:
    exporter, port = _lingering()
    exporter.export(_finished(SMALL))
    exporter.close()
    second = PrometheusExporter(port=port)
    second.start()
    second.export(replace(SMALL, run="run-2"))
    assert b'run="run-2"' in _get_from(port)
    second.close()
    assert _threads() == []


def test_an_endpoint_that_has_nothing_to_show_does_not_linger() -> None:
    exporter = PrometheusExporter(port=0, linger_seconds=1e6)
    exporter.start()
    exporter.close()
    assert _threads() == []


# processes


def _python(script: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def _say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


_START = """
import os, sys, warnings
from dataclasses import replace
from moe_telemetry.delivery import Delivery
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter
warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, about a fork with threads
snapshot = make_snapshot(num_layers=1)
exporter = PrometheusExporter(port=0, linger_seconds=float(os.environ.get("LINGER", "0")))
exporter.start()
exporter.export(snapshot)
port = int(exporter.url.split(":")[2].split("/")[0])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_neither_holds_nor_serves_the_port_and_may_have_one_of_its_own() -> None:
    script = (
        _START
        + """
files = len(os.listdir("/proc/self/fd"))
end, tell = os.pipe()
child = os.fork()
if not child:
    assert len(os.listdir("/proc/self/fd")) < files, "the child has the parent's sockets"
    assert exporter.url is None
    exporter.close()
    own = PrometheusExporter(port=0)
    own.start()
    own.export(replace(snapshot, run="child"))
    print("child", own.url.split(":")[2].split("/")[0], flush=True)
    os.read(end, 1)
    own.close()
    os._exit(0)
print("parent", port, flush=True)
sys.stdin.readline()
exporter.close()
print("closed", flush=True)
sys.stdin.readline()
os.write(tell, b"x")
sys.exit(os.waitpid(child, 0)[1])
"""
    )
    with _python(script) as process:
        ports = {name: int(port) for name, port in (_line(process).split() for _ in range(2))}
        assert b'run="run-1"' in _get_from(ports["parent"])
        assert b'run="child"' in _get_from(ports["child"])
        _say(process)
        assert _line(process) == "closed"
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", ports["parent"]))
            again.listen()
        assert b'run="child"' in _get_from(ports["child"])
        _say(process)
    assert process.returncode == 0


def test_a_process_that_ends_waits_for_the_last_scrape() -> None:
    script = (
        _START
        + """
exporter.export(replace(snapshot, health=replace(snapshot.health, run_finished=True)))
exporter.close()
print(port, flush=True)
"""
    )
    with _python(script, LINGER="1e6") as process:
        port = int(_line(process))
        assert b'moe_telemetry_run_finished{run="run-1"} 1' in _get_from(port)
    assert process.returncode == 0


def test_a_run_that_is_closed_at_exit_waits_for_a_moment() -> None:
    script = (
        _START
        + """
import atexit
delivery = Delivery([("prometheus", exporter)])
delivery.put(replace(snapshot, health=replace(snapshot.health, run_finished=True)))
atexit.register(lambda: print(port, flush=True) or delivery.close(10))
"""
    )
    with _python(script, LINGER="1e6") as process:
        port = int(_line(process))
        _wait_until(lambda: b'moe_telemetry_run_finished{run="run-1"} 1' in _get_from(port))
    assert process.returncode == 0


def test_files_for_many_processes_are_not_ours_to_use(tmp_path: Path) -> None:
    script = (
        _START
        + """
import urllib.request
with urllib.request.urlopen(exporter.url) as response:
    print(sum(line.startswith(b"moe_telemetry_step{") for line in response))
exporter.close()
"""
    )
    with _python(script, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)) as process:
        assert _line(process) == "1"
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []

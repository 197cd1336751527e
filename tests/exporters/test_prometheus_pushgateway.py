"""PushgatewayExporter: what is sent where and when, and that failures are failures."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from moe_telemetry import ConfigError, ExporterError, Snapshot
from moe_telemetry.delivery import Delivery
from moe_telemetry.plugins import Exporter, exporter_scope, resolve_exporter
from moe_telemetry.testing import ExporterContract, make_snapshot
from moe_telemetry_exporters.prometheus.pushgateway import PushgatewayExporter
from moe_telemetry_exporters.prometheus.text import TextRenderer

PASSWORD = "push secret"


@dataclass
class Sink:
    """A server that takes everything, or answers with the error that it is told to."""

    url: str = ""
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200

    @property
    def steps(self) -> list[int]:
        lines = [line for _, _, body in self.requests for line in body.decode().splitlines()]
        return [int(line.split()[-1]) for line in lines if line.startswith("moe_telemetry_step{")]


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            sink.requests.append((self.command, self.path, body))
            sink.headers.append(dict(self.headers))
            self.send_response(sink.status)
            self.end_headers()
            self.wfile.write(b"said by the server" * 100)

        do_DELETE = do_PUT

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    sink.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield sink
    server.shutdown()
    server.server_close()
    thread.join()


class TestPushgateway(ExporterContract):
    @pytest.fixture(autouse=True)
    def _at_the_sink(self, sink: Sink) -> None:
        self.sink = sink

    def make_exporter(self, tmp_path: Path) -> Exporter:  # noqa: ARG002  # it writes no files
        return PushgatewayExporter(url=self.sink.url)


def _exporter(sink: Sink, **settings: Any) -> PushgatewayExporter:
    exporter = PushgatewayExporter(**{"url": sink.url, "interval_seconds": 0.0, **settings})
    exporter.start()
    return exporter


def _finished(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, health=replace(snapshot.health, run_finished=True))


def test_a_snapshot_replaces_the_group_of_its_node(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make_snapshot(node=1, num_nodes=2)
    monkeypatch.delenv("GROUP_RANK", raising=False)
    _exporter(sink).export(snapshot)
    expected = ("PUT", f"/metrics/job/moe-telemetry/instance/{socket.gethostname()}")
    assert sink.requests == [(*expected, TextRenderer().render(snapshot, openmetrics=False))]
    assert sink.headers[0]["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_two_launches_on_one_host_have_two_groups(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("0", "1"):
        monkeypatch.setenv("GROUP_RANK", node)
        _exporter(sink).export(make_snapshot())
    encoded = [path.rpartition("instance@base64/")[2] for _, path, _ in sink.requests]
    names = [base64.urlsafe_b64decode(text).decode() for text in encoded]
    assert names == [f"{socket.gethostname()}/0", f"{socket.gethostname()}/1"]


@pytest.mark.parametrize("text", ["plain", "a b", "é漢🙂", "100%?#&+", "a.b", "..", ".", "a/b", "a\nb", '"\\'])
def test_any_text_may_name_a_group(sink: Sink, text: str) -> None:
    _exporter(sink, job=text, instance=text, group_by_run=True).export(make_snapshot(run=text))
    parts = sink.requests[0][1].removeprefix("/metrics/").split("/")
    read = {
        name.removesuffix("@base64"): base64.urlsafe_b64decode(value).decode() if "@" in name else unquote(value)
        for name, value in zip(parts[::2], parts[1::2], strict=True)
    }
    assert read == {"job": text, "instance": text, "run": text}


def test_a_path_prefix_is_kept(sink: Sink) -> None:
    _exporter(sink, url=f"{sink.url}/prefix/", instance="a").export(make_snapshot())
    assert sink.requests[0][1] == "/prefix/metrics/job/moe-telemetry/instance/a"


def test_pushes_are_no_more_frequent_than_asked_and_the_last_one_always_comes(sink: Sink) -> None:
    exporter = _exporter(sink, interval_seconds=1e6)
    for step in (1, 2, 3):
        exporter.export(make_snapshot(step=step))
    exporter.export(_finished(make_snapshot(step=4)))
    exporter.close()
    assert sink.steps == [1, 4]


def test_a_snapshot_that_was_kept_is_pushed_by_close(sink: Sink) -> None:
    exporter = _exporter(sink, interval_seconds=1e6)
    for step in (1, 2, 3):
        exporter.export(make_snapshot(step=step))
    exporter.close()
    exporter.close()
    assert sink.steps == [1, 3]


def test_where_asked_the_group_is_deleted_at_the_end(sink: Sink) -> None:
    exporter = _exporter(sink, delete_at_close=True, instance="a")
    exporter.close()
    assert sink.requests == [], "nothing was pushed, so nothing is ours to delete"
    exporter.export(make_snapshot())
    exporter.close()
    exporter.close()
    assert [method for method, _, _ in sink.requests] == ["PUT", "DELETE"]
    assert len({path for _, path, _ in sink.requests}) == 1


def test_the_user_name_and_the_password_are_sent_and_never_shown(sink: Sink, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(PASSWORD + "\n", encoding="utf-8")
    by_value = _exporter(sink, username="me", password=PASSWORD)
    by_file = _exporter(sink, username="me", password_file=tmp_path / "password")
    sink.status = 401
    for exporter in (by_value, by_file):
        with pytest.raises(ExporterError, match="answers 401 said by") as caught:
            exporter.export(make_snapshot())
        assert PASSWORD not in str(caught.value) + repr(exporter)
    expected = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    assert [headers["Authorization"] for headers in sink.headers] == [f"Basic {expected}"] * 2


@pytest.mark.parametrize("status", [301, 400, 413, 500])
def test_a_push_that_is_refused_is_an_error_and_the_next_one_is_tried(sink: Sink, status: int) -> None:
    exporter = _exporter(sink)
    sink.status = status
    with pytest.raises(ExporterError, match=f"PUT http.*answers {status} said by") as caught:
        exporter.export(make_snapshot(step=1))
    assert len(str(caught.value)) < 800
    sink.status = 202
    exporter.export(make_snapshot(step=2))
    assert sink.steps == [1, 2]


def test_a_gateway_that_is_away_costs_errors_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    exporter = PushgatewayExporter(url=f"http://127.0.0.1:{port}", interval_seconds=0)
    delivery = Delivery([("pushgateway", exporter)])
    for step in (1, 2):
        delivery.put(make_snapshot(step=step))
    delivery.close(30)
    assert delivery.errors == {"pushgateway": 2}
    assert "Connection refused. Is MOE_TELEMETRY_PUSHGATEWAY_URL right?" in caplog.text


def test_a_gateway_that_does_not_answer_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ExporterError, match="timed out"):
            PushgatewayExporter(url=url, timeout_seconds=0.1).export(make_snapshot())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "pushgateway:9091"}, "url='pushgateway:9091': expected http"),
        ({"url": "ftp://host"}, "url='ftp://host'"),
        ({"url": "http://"}, "url='http://'"),
        ({"url": "http://host:port"}, "url='http://host:port'"),
        ({"url": "http://["}, r"url='http://\['"),
        ({"url": "http://host/?a=b"}, "url="),
        ({"url": f"http://me:{PASSWORD}@host"}, "url: expected no user in it"),
        ({"url": f"me:{PASSWORD}@host:9091"}, "url: expected no user in it"),
        ({"job": ""}, "job=''"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"interval_seconds": -1}, "interval_seconds=-1"),
        ({"username": "me"}, "exactly one of password and password_file"),
    ],
)
def test_wrong_settings_are_refused_when_it_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PushgatewayExporter(**settings)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("content", [None, "no PEM"])
def test_certificates_that_cannot_be_read_are_an_error_at_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ExporterError, match="cafile=.*Expected certificates in PEM"):
        PushgatewayExporter(cafile=file).start()


def test_it_is_found_by_name_and_used_once_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TELEMETRY_PUSHGATEWAY_URL", "https://gateway:9091")
    monkeypatch.setenv("MOE_TELEMETRY_PUSHGATEWAY_GROUP_BY_RUN", "true")
    _, exporter = resolve_exporter("pushgateway")
    assert isinstance(exporter, PushgatewayExporter)
    assert (exporter.url, exporter.group_by_run, exporter_scope(exporter)) == ("https://gateway:9091", True, "node")

"""`moe-telemetry watch` and its endpoint: addresses, passwords, certificates, and what answers in its place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from moe_telemetry.cli import main
from moe_telemetry.cli.watch.source import Source
from moe_telemetry.errors import TelemetryError
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter
from tests.cli.endpoints import address_of, as_of_now


@pytest.mark.parametrize("arguments", [[], ["--once"], ["--json"]])
def test_an_endpoint_that_is_not_there_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "127.0.0.1:1", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "moe-telemetry: no endpoint at http://127.0.0.1:1/ (Connection refused): "
        "is the run up, with a Prometheus exporter on that port?\n"
    )


@pytest.mark.parametrize(
    "address",
    [
        *("ftp://x:1", "http://", "127.0.0.1:99999", "127.0.0.1:port", "127.0.0.1:0", "http://[::1", "http://a b:1"),
        *(f"http://{'a' * 300}:1", "http://node/a b", "https://u:secret@", "u:secret@[::1", "http://u:secret@[::1"),
    ],
)
def test_what_is_no_address_is_refused_without_its_password(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", address]) == 2
    error = capsys.readouterr().err
    assert "expected the address of an endpoint, as in 127.0.0.1:9464" in error
    assert "secret" not in error
    assert error.count("\n") == 1


class _Other(BaseHTTPRequestHandler):
    """A server that is not ours, or that wants a password."""

    def do_GET(self) -> None:
        status, body = self.server.answer  # type: ignore[attr-defined]
        if self.headers.get("Authorization") == "Basic dTpwOndvcmQ=":  # u:p:word
            status, body = 200, b'{"schema": 1, "state": "waiting", "now": 0, "version": "0"}'
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _other(status: int, body: bytes) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Other)
    server.answer = status, body  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"", "is it the endpoint of moe-telemetry, and of this version?"),
        (200, b"<html>", "is not what moe-telemetry serves: b'<html>'"),
        (200, b"[1]", "is not what moe-telemetry serves"),
        (200, b'{"schema": 7}', "speaks schema 7, this version 1"),
        (200, b'{"schema": 1}', "live.json is not whole: now, state missing"),
        (200, b'{"schema": 1, "state": "live", "now": 0, "layers": []}', "live.json is not whole: alerts, curves"),
        (200, b"[" * 200_000, "is not what moe-telemetry serves"),
        (401, b"", "give user and password in the URL, https://USER:PASSWORD@host"),
    ],
)
def test_another_answer_is_explained(
    status: int, body: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _other(status, body) as address:
        assert main(["watch", address, "--once"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_user_and_password_come_from_the_address_or_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _other(401, b"") as address:
        assert main(["watch", f"http://u:p%3Aword@{address}", "--once"]) == 0
        environ = {"MOE_TELEMETRY_PROMETHEUS_USERNAME": "u", "MOE_TELEMETRY_PROMETHEUS_PASSWORD": "p:word"}
        assert Source(address, environ=environ).fetch()["state"] == "waiting"
        (tmp_path / "password").write_text("p:word\n")
        environ = {
            "MOE_TELEMETRY_PROMETHEUS_USERNAME": "u",
            "MOE_TELEMETRY_PROMETHEUS_PASSWORD_FILE": str(tmp_path / "password"),
        }
        assert Source(address, environ=environ).fetch()["state"] == "waiting"
        assert main(["watch", f"http://u:wrong@{address}", "--once"]) == 2
    assert "wrong" not in capsys.readouterr().err


class _Moved(BaseHTTPRequestHandler):
    """A server that sends everybody to the first host it was told, and tells what it was asked with."""

    def do_GET(self) -> None:
        self.server.seen.append(self.headers.get("Authorization"))  # type: ignore[attr-defined]
        self.send_response(302)
        host = self.server.hosts.pop(0)  # type: ignore[attr-defined]
        self.send_header("Location", f"http://{host}:{self.server.server_port}{self.path}")  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_an_endpoint_that_has_moved_to_another_host_does_not_get_the_password() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Moved)
    server.hosts, server.seen = ["127.0.0.1", "localhost", "nowhere.invalid"], []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    with pytest.raises(TelemetryError, match="no endpoint at"):
        Source(f"http://u:p%3Aword@127.0.0.1:{server.server_port}").fetch()
    server.shutdown()
    thread.join()
    server.server_close()
    assert server.seen == ["Basic dTpwOndvcmQ=", "Basic dTpwOndvcmQ=", None]  # type: ignore[attr-defined]


def test_an_endpoint_without_tls_is_told_apart_from_none(
    exporter: PrometheusExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", f"https://{address_of(exporter)}"]) == 2
    assert "it does not speak TLS; http:// instead" in capsys.readouterr().err


def test_a_certificate_that_is_not_trusted_is_explained_and_can_be_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    both = str(tmp_path / "both.pem")
    exporter = PrometheusExporter(port=0, certfile=both, keyfile=both)
    exporter.start()
    exporter.export(as_of_now(make_snapshot()))
    try:
        assert main(["watch", f"https://{address_of(exporter)}", "--once"]) == 2
        assert "--insecure goes on without a check" in capsys.readouterr().err
        assert main(["watch", f"https://{address_of(exporter)}", "--once", "--insecure"]) == 0
        assert "run-1  live" in capsys.readouterr().out
    finally:
        exporter.close()

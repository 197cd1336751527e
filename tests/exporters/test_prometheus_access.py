"""Who may scrape: TLS, client certificates, user names and passwords, and that no secret is ever shown."""

from __future__ import annotations

import base64
import logging
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from prometheus_client import CollectorRegistry

from moe_telemetry import ConfigError, ExporterError
from moe_telemetry.delivery import Delivery
from moe_telemetry.environment import fields_from_env
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.endpoint import server as endpoint_server
from moe_telemetry_exporters.prometheus import PrometheusExporter

PASSWORD = "correct horse:battery étoile"


@dataclass(frozen=True)
class Pki:
    """An authority, what it has issued, and another authority that nobody trusts."""

    folder: Path
    authority: trustme.CA

    @property
    def cafile(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, *, authority: trustme.CA | None = None) -> tuple[Path, Path]:
        """Write a certificate and its key."""
        cert = (authority or self.authority).issue_cert("127.0.0.1", "localhost", common_name=name)
        certfile, keyfile = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certfile.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
        keyfile.write_bytes(cert.private_key_pem.bytes())
        return certfile, keyfile

    def client(self, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.cafile))
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return Pki(folder, authority)


@pytest.fixture
def opened() -> Iterator[Any]:
    with ExitStack() as stack:

        def open_endpoint(**settings: Any) -> PrometheusExporter:
            exporter = PrometheusExporter(port=0, **settings)
            stack.callback(exporter.close)
            exporter.start()
            exporter.export(make_snapshot())
            return exporter

        yield open_endpoint


def _get(
    exporter: PrometheusExporter, context: ssl.SSLContext | None = None, headers: dict[str, str] | None = None
) -> bytes:
    assert exporter.url is not None
    request = urllib.request.Request(exporter.url, headers=headers or {})
    with urllib.request.urlopen(request, timeout=10, context=context) as response:
        body: bytes = response.read()
    return body


def _basic(username: str, password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{username}:{password}'.encode()).decode()}"}


# TLS


def test_an_endpoint_with_a_certificate_speaks_tls_alone(opened: Any, pki: Pki) -> None:
    certfile, keyfile = pki.issue("server")
    exporter = opened(certfile=certfile, keyfile=str(keyfile))
    assert exporter.url.startswith("https://")
    assert b"moe_telemetry_step" in _get(exporter, pki.client())
    with pytest.raises(OSError, match="certificate verify failed"):
        _get(exporter, ssl.create_default_context())
    with pytest.raises(OSError, match="reset|closed|empty|without response"):
        urllib.request.urlopen(exporter.url.replace("https", "http"), timeout=10)
    assert b"moe_telemetry_step" in _get(exporter, pki.client())


def test_certificate_and_key_may_be_one_file(opened: Any, pki: Pki, tmp_path: Path) -> None:
    certfile, keyfile = pki.issue("server")
    both = tmp_path / "both.pem"
    both.write_bytes(keyfile.read_bytes() + certfile.read_bytes())
    assert b"moe_telemetry_step" in _get(opened(certfile=both), pki.client())


def test_with_an_authority_only_its_clients_are_answered(opened: Any, pki: Pki) -> None:
    certfile, keyfile = pki.issue("server")
    exporter = opened(certfile=certfile, keyfile=keyfile, client_cafile=pki.cafile)
    assert b"moe_telemetry_step" in _get(exporter, pki.client(pki.issue("client")))
    for certificate in (None, pki.issue("stranger", authority=trustme.CA())):
        with pytest.raises(OSError, match="alert|reset|closed|EOF"):
            _get(exporter, pki.client(certificate))


def test_a_renewed_certificate_is_used_from_the_next_connection_on(opened: Any, pki: Pki, tmp_path: Path) -> None:
    certfile, keyfile = pki.issue("server")
    exporter = opened(certfile=certfile, keyfile=keyfile)
    other = trustme.CA()
    other.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    new_context = ssl.create_default_context(cafile=str(tmp_path / "other.pem"))
    assert _get(exporter, pki.client())
    keyfile.write_text("half of a")  # what is there is used until both are right
    assert _get(exporter, pki.client())
    pki.issue("server", authority=other)
    assert _get(exporter, new_context)
    with pytest.raises(OSError, match="certificate verify failed"):
        _get(exporter, pki.client())


@pytest.mark.parametrize("broken", ["certfile", "keyfile", "client_cafile"])
@pytest.mark.parametrize("content", [None, "", "no PEM"])
def test_a_file_that_is_no_certificate_is_one_error_that_names_it(
    pki: Pki, tmp_path: Path, broken: str, content: str | None
) -> None:
    certfile, keyfile = pki.issue("server")
    files = {"certfile": certfile, "keyfile": keyfile, "client_cafile": pki.cafile, broken: tmp_path / "broken.pem"}
    if content is not None:
        files[broken].write_text(content)
    exporter = PrometheusExporter(port=0, **files)  # type: ignore[arg-type]
    with pytest.raises(ExporterError, match=rf"{broken}=.*broken\.pem.*Expected .*PEM"):
        exporter.start()
    assert exporter.url is None


def test_a_key_with_a_passphrase_asks_nobody_for_it(pki: Pki, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    certfile, keyfile = pki.issue("server")
    key = serialization.load_pem_private_key(keyfile.read_bytes(), None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ExporterError, match="the key has a passphrase"):
        PrometheusExporter(port=0, certfile=certfile, keyfile=encrypted).start()


def test_a_key_of_another_certificate_is_refused(pki: Pki) -> None:
    with pytest.raises(ExporterError, match=r"certfile=.*keyfile=.*mismatch|MISMATCH"):
        PrometheusExporter(port=0, certfile=pki.issue("one")[0], keyfile=pki.issue("two")[1]).start()


# basic authentication


def test_only_the_right_user_with_the_right_password_is_answered(opened: Any) -> None:
    exporter = opened(username="prometheus", password=PASSWORD)
    assert b"moe_telemetry_step" in _get(exporter, headers=_basic("prometheus", PASSWORD))
    wrong: list[dict[str, str]] = [
        {},
        _basic("prometheus", "wrong"),
        _basic("prometheus", ""),
        _basic("other", PASSWORD),
        _basic("", PASSWORD),
        {"Authorization": "Basic"},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic é"},
        {"Authorization": "Bearer " + _basic("prometheus", PASSWORD)["Authorization"][6:]},
    ]
    for headers in wrong:
        with pytest.raises(urllib.error.HTTPError) as caught:
            _get(exporter, headers=headers)
        with caught.value as error:
            assert (error.code, error.headers["WWW-Authenticate"].split()[0]) == (401, "Basic")
            assert PASSWORD.encode() not in error.read()


def test_no_path_is_answered_or_named_without_the_password(opened: Any) -> None:
    exporter = opened(username="prometheus", password=PASSWORD)
    for path in ("/", "/metrics", "/live.json", "/nothing"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(exporter.url.replace("/metrics", path), timeout=10)
        with caught.value as error:
            assert error.code == 401
            assert b"metrics" not in error.read()


def test_a_password_may_come_from_a_file_that_changes(opened: Any, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n", encoding="utf-8")
    exporter = opened(username="prometheus", password_file=file)
    assert _get(exporter, headers=_basic("prometheus", "first"))
    file.write_text("second", encoding="utf-8")
    assert _get(exporter, headers=_basic("prometheus", "second"))
    for text in ("first", ""):
        with pytest.raises(urllib.error.HTTPError):
            _get(exporter, headers=_basic("prometheus", text))
    file.unlink()  # nobody is answered without a password to compare with
    with pytest.raises(urllib.error.HTTPError):
        _get(exporter, headers=_basic("prometheus", "second"))


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read: No such file"), ("\n", "is empty")])
def test_a_password_file_without_a_password_opens_no_endpoint(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    exporter = PrometheusExporter(port=0, username="prometheus", password_file=file)
    with pytest.raises(ExporterError, match=message):
        exporter.start()
    assert exporter.url is None


# settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keyfile": "k"}, "keyfile='k' needs certfile"),
        ({"client_cafile": "c"}, "client_cafile='c' needs certfile"),
        ({"username": "u"}, "exactly one of password and password_file"),
        ({"username": "u", "password": PASSWORD, "password_file": "f"}, "exactly one of password and password_file"),
        ({"password": PASSWORD}, "need username"),
        ({"password_file": "f"}, "need username"),
        ({"username": "a:b", "password": PASSWORD}, "without a colon"),
        ({"username": "", "password": PASSWORD}, "username=''"),
        ({"username": "u", "password": ""}, "expected a text that is not empty"),
        ({"username": "u", "password": PASSWORD, "registry": CollectorRegistry()}, "registry: no endpoint"),
        ({"certfile": "c", "registry": CollectorRegistry()}, "registry: no endpoint"),
        ({"linger_seconds": -1.0}, "linger_seconds=-1.0"),
        ({"linger_seconds": float("nan")}, "linger_seconds=nan"),
        ({"port_tries": 0}, "port_tries=0"),
        ({"address": ""}, "address='': expected an address"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_when_it_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PrometheusExporter(**settings)
    assert PASSWORD not in str(caught.value)


def test_every_setting_can_come_from_the_environment() -> None:
    variables = {
        "CERTFILE": "c",
        "KEYFILE": "k",
        "CLIENT_CAFILE": "a",
        "USERNAME": "u",
        "PASSWORD_FILE": "f",
        "LINGER_SECONDS": "15",
        "PORT_TRIES": "4",
    }
    environ = {f"MOE_TELEMETRY_PROMETHEUS_{name}": value for name, value in variables.items()}
    exporter = PrometheusExporter(**fields_from_env(PrometheusExporter, "MOE_TELEMETRY_PROMETHEUS_", environ))
    assert (exporter.certfile, exporter.client_cafile, exporter.password_file) == ("c", "a", "f")
    assert (exporter.linger_seconds, exporter.port_tries) == (15.0, 4)


def test_the_password_is_in_no_repr_no_log_and_no_metric(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    exporter = opened(username="prometheus", password=PASSWORD)
    body = _get(exporter, headers=_basic("prometheus", PASSWORD))
    with pytest.raises(urllib.error.HTTPError):
        _get(exporter)
    taken = PrometheusExporter(port=int(exporter.url.split(":")[2].split("/")[0]), username="u", password=PASSWORD)
    delivery = Delivery([("prometheus", taken)])
    delivery.close(10)
    assert "cannot listen" in caplog.text
    shown = repr(exporter) + repr(exporter._credentials) + caplog.text + body.decode()
    assert "horse" not in shown
    assert base64.b64encode(f"prometheus:{PASSWORD}".encode()).decode() not in shown


# clients that do harm


def test_clients_that_never_finish_their_handshake_make_nobody_wait(
    opened: Any, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_server, "_HANDSHAKE_SECONDS", 1e6)
    certfile, keyfile = pki.issue("server")
    exporter = opened(certfile=certfile, keyfile=keyfile)
    port = int(exporter.url.split(":")[2].split("/")[0])
    silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(20)]
    for client in silent[:10]:
        client.sendall(b"\x16\x03\x01")  # the beginning of a handshake
    silent[10].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    silent.pop().close()
    assert b"moe_telemetry_step" in _get(exporter, pki.client())
    exporter.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("moe-telemetry")]
    for client in silent:
        with suppress(ConnectionResetError):
            assert b"HTTP" not in client.recv(1000)
        client.close()


def test_a_handshake_that_takes_too_long_is_ended(opened: Any, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_server, "_HANDSHAKE_SECONDS", 0.1)
    certfile, keyfile = pki.issue("server")
    exporter = opened(certfile=certfile, keyfile=keyfile)
    with socket.create_connection(("127.0.0.1", int(exporter.url.split(":")[2].split("/")[0])), timeout=30) as client:
        assert client.recv(1) == b""

"""PrometheusExporter: the last snapshot at an HTTP endpoint, or in a registry of the user's own.

    mt.watch(model, PrometheusExporter(port=9464))     # http://127.0.0.1:9464/metrics

The endpoint shows a live page at `/` as well. `export` swaps references; text is made when a scrape asks for
it, in the scrape's thread. Every series has the labels `run` and those of the configuration.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from prometheus_client.registry import CollectorRegistry

from moe_telemetry.errors import ConfigError, ExporterError
from moe_telemetry.snapshot import Scope, Snapshot
from moe_telemetry_exporters.endpoint.accept import prefers_openmetrics
from moe_telemetry_exporters.endpoint.credentials import Credentials
from moe_telemetry_exporters.endpoint.server import MetricsServer, Reply, Request, Route
from moe_telemetry_exporters.endpoint.tls import Certificates, Tls
from moe_telemetry_exporters.live import LiveView
from moe_telemetry_exporters.live.page import live_routes
from moe_telemetry_exporters.prometheus.collector import SnapshotCollector
from moe_telemetry_exporters.prometheus.linger import Audience, end_lingering, linger
from moe_telemetry_exporters.settings import check_types

__all__ = ["PrometheusExporter"]

_logger = logging.getLogger("moe_telemetry")

_LAST_PORT = 65535
_ANOTHER_PORT = (
    "Choose another port with PrometheusExporter(port=...) or MOE_TELEMETRY_PROMETHEUS_PORT; 0 takes any free one"
)
_ANOTHER_ADDRESS = (
    "Name an address of this machine with PrometheusExporter(address=...) or MOE_TELEMETRY_PROMETHEUS_ADDRESS"
)
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(kw_only=True, eq=False)
class PrometheusExporter:
    """Exports to Prometheus, from one process a node: each endpoint has its node's share of the counters."""

    scope: ClassVar[Scope] = "node"

    port: int = 9464
    """Port of the endpoint; 0 takes any free one, and `url` tells which."""
    port_tries: int = 1
    """Ports to try, from `port` on, before the endpoint is given up: for several jobs on one node."""
    address: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` lets other machines scrape."""
    certfile: str | os.PathLike[str] | None = None
    """Certificate of the endpoint, in PEM with its chain: the endpoint then speaks TLS alone. Files that are
    replaced while it runs are used from the next connection on."""
    keyfile: str | os.PathLike[str] | None = None
    """Private key of the certificate, where `certfile` does not have it."""
    client_cafile: str | os.PathLike[str] | None = None
    """Certificates of authorities: only clients with a certificate of theirs are answered (mutual TLS)."""
    username: str | None = None
    """Whom to answer, with basic authentication; over TLS, for otherwise the password can be read on the way."""
    password: str | None = field(default=None, repr=False)
    """Password of `username`."""
    password_file: str | os.PathLike[str] | None = None
    """File with the password instead; it is read at every scrape."""
    linger_seconds: float = 0.0
    """How long the endpoint stays after `close()`, at most, for scrapes to see that the run is finished: until
    everyone who scraped in the last five minutes has. `close()` does not wait for it; the end of the process does."""
    registry: CollectorRegistry | None = None
    """Register there instead of opening an endpoint: for a program that has an endpoint already. No setting of
    an endpoint is then used."""

    _collector: SnapshotCollector = field(init=False, repr=False)
    _audience: Audience = field(init=False, repr=False)
    _view: LiveView = field(init=False, repr=False)
    _credentials: Credentials | None = field(init=False, default=None, repr=False)
    _certificates: Certificates | None = field(init=False, default=None, repr=False)
    _server: MetricsServer | None = field(init=False, default=None, repr=False)
    _joined: CollectorRegistry | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_types(self)
        _check_port("port", self.port, least=0)
        _check_port("port_tries", self.port_tries, least=1)
        if not self.address:  # to a socket it means all interfaces, and a variable may be empty by mistake
            raise ConfigError("address='': expected an address to listen on; 0.0.0.0 lets other machines scrape")
        if not 0 <= self.linger_seconds < math.inf:
            raise ConfigError(f"linger_seconds={self.linger_seconds!r}: expected a number of seconds, 0 or more")
        self._credentials = Credentials.of(self.username, self.password, self.password_file)
        self._certificates = Certificates.of(self.certfile, self.keyfile, self.client_cafile)
        if self.registry is not None and (self._credentials or self._certificates):
            raise ConfigError("registry: no endpoint is opened, so certificates and passwords would protect nothing")
        self._collector = SnapshotCollector()
        self._audience = Audience()
        self._view = LiveView()

    @property
    def url(self) -> str | None:
        """Where the endpoint is, while it is up."""
        if self._server is None or self._server.is_closing:
            return None
        scheme = "http" if self._certificates is None else "https"
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{scheme}://{host}:{self._server.port}/metrics"

    def start(self) -> None:
        """Open the endpoint, or join the registry.

        Raises:
            ExporterError: the port is taken, the address is not this machine's, a certificate or the password
                cannot be read, or the registry has metrics of these names already.
        """
        if self.registry is not None:
            self._join(self.registry)
        elif self.url is None:
            self._server = self._serve()

    def _serve(self) -> MetricsServer:
        tls = None if self._certificates is None else Tls(self._certificates)
        if self._credentials is not None:
            self._credentials.header()  # a password that cannot be read is reported now
        last = min(self.port + self.port_tries - 1, _LAST_PORT)
        for port in range(self.port, last):
            with suppress(OSError):
                return self._bind(port, tls)
        try:
            return self._bind(last, tls)
        except OSError as error:
            ports = f"{self.port}" if last == self.port else f"{self.port} to {last}"
            advice = _ANOTHER_PORT if error.errno in {errno.EADDRINUSE, errno.EACCES} else _ANOTHER_ADDRESS
            raise ExporterError(f"cannot listen on {self.address}:{ports}: {error.strerror}. {advice}") from error

    def _bind(self, port: int, tls: Tls | None) -> MetricsServer:
        end_lingering(port)
        server = MetricsServer(self.address, port, self._routes(), tls=tls, credentials=self._credentials)
        if self.port not in {0, port}:
            _logger.warning("moe_telemetry: port %d is taken; the endpoint is at port %d", self.port, port)
        return server

    def _routes(self) -> Mapping[str, Route]:
        return {"/metrics": self._answer, **live_routes(self._view)}

    def _answer(self, request: Request) -> Reply:
        """Return the last snapshot in the format that a scrape asks for."""
        openmetrics = prefers_openmetrics(request.headers.get("Accept", ""))
        names = frozenset(request.query.get("name[]", ()))
        snapshot = self._collector.snapshot
        body = self._collector.render(snapshot, openmetrics=openmetrics, names=names or None)
        finished = snapshot is not None and snapshot.health.run_finished
        note = partial(self._audience.scraped, request.client, finished=finished)
        return Reply(_OPENMETRICS if openmetrics else _TEXT, body, on_sent=None if names else note)

    def _join(self, registry: CollectorRegistry) -> None:
        if self._joined is not None:
            return
        try:
            registry.register(self._collector)
        except ValueError as error:
            raise ExporterError(f"the registry has metrics of these names already: {error}") from error
        self._joined = registry

    def export(self, snapshot: Snapshot) -> None:
        """Show `snapshot` from now on."""
        self._collector.snapshot = snapshot
        if self.registry is None:
            self._view.show(snapshot)

    def close(self) -> None:
        """Close the endpoint, at once or after `linger_seconds`, or leave the registry."""
        server, self._server = self._server, None
        if server is not None and not server.is_closing:
            if self.linger_seconds and self._collector.snapshot is not None:
                linger(server, self._audience, self.linger_seconds)
            else:
                server.close()
        if self._joined is not None:
            self._joined.unregister(self._collector)
            self._joined = None


def _check_port(name: str, value: int, *, least: int) -> None:
    if not least <= value <= _LAST_PORT:
        raise ConfigError(f"{name}={value!r}: expected a whole number from {least} to {_LAST_PORT}")

"""PrometheusExporter: the last snapshot at an HTTP endpoint, or in a registry of the user's own.

    mt.watch(model, PrometheusExporter(port=9464))     # http://127.0.0.1:9464/metrics

The endpoint shows a live page at `/` as well. `export` swaps references; text is made when a scrape asks for
it, in the scrape's thread. Every series has the labels `run` and those of the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import CollectorRegistry

from moe_telemetry.catalog import METRICS, Metric, metric_of
from moe_telemetry.errors import ConfigError, ExporterError
from moe_telemetry.snapshot import Scope, Snapshot
from moe_telemetry_exporters.live import LiveView
from moe_telemetry_exporters.live_page import live_routes
from moe_telemetry_exporters.prometheus_accept import prefers_openmetrics
from moe_telemetry_exporters.prometheus_server import MetricsServer, Reply, Request, Route
from moe_telemetry_exporters.prometheus_text import TextRenderer

__all__ = ["PrometheusExporter", "SnapshotCollector"]

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_FAMILIES: Mapping[str, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(kw_only=True, eq=False)
class PrometheusExporter:
    """Exports to Prometheus, from one process a node: each endpoint has its node's share of the counters."""

    scope: ClassVar[Scope] = "node"

    port: int = 9464
    """Port of the endpoint; 0 takes any free one, and `url` tells which."""
    address: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` lets other machines scrape."""
    registry: CollectorRegistry | None = None
    """Register there instead of opening an endpoint: for a program that has an endpoint already. `port`
    and `address` are then not used."""

    _collector: SnapshotCollector = field(init=False, repr=False)
    _view: LiveView = field(init=False, repr=False)
    _server: MetricsServer | None = field(init=False, default=None, repr=False)
    _joined: CollectorRegistry | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port!r}: expected a whole number from 0 to 65535")
        self._collector = SnapshotCollector()
        self._view = LiveView()

    @property
    def url(self) -> str | None:
        """Where the endpoint is, while it is up."""
        if self._server is None:
            return None
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self._server.port}/metrics"

    def start(self) -> None:
        """Open the endpoint, or join the registry.

        Raises:
            ExporterError: the port is taken, the address is not this machine's, or the registry has
                these metrics already.
        """
        if self.registry is not None:
            self._join(self.registry)
        elif self._server is None:
            self._server = self._serve()

    def _serve(self) -> MetricsServer:
        try:
            return MetricsServer(self.address, self.port, self._routes())
        except OSError as error:
            raise ExporterError(
                f"cannot listen on {self.address}:{self.port}: {error.strerror}. Choose another port with "
                "PrometheusExporter(port=...) or MOE_TELEMETRY_PROMETHEUS_PORT; 0 takes any free one"
            ) from error

    def _routes(self) -> Mapping[str, Route]:
        return {"/metrics": self._collector.answer, **live_routes(self._view)}

    def _join(self, registry: CollectorRegistry) -> None:
        if self._joined is not None:
            return
        try:
            registry.register(self._collector)
        except ValueError as error:
            raise ExporterError(f"the registry has metrics of moe-telemetry already: {error}") from error
        self._joined = registry

    def export(self, snapshot: Snapshot) -> None:
        """Show `snapshot` from now on."""
        self._collector.snapshot = snapshot
        if self.registry is None:
            self._view.show(snapshot)

    def close(self) -> None:
        """Close the endpoint, or leave the registry."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._joined is not None:
            self._joined.unregister(self._collector)
            self._joined = None


class SnapshotCollector:
    """A `prometheus_client` collector over the last snapshot."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self._renderer = TextRenderer()

    def answer(self, request: Request) -> Reply:
        """Return the last snapshot in the format that a scrape asks for; before the first one nothing is shown."""
        openmetrics = prefers_openmetrics(request.headers.get("Accept", ""))
        names = frozenset(request.query.get("name[]", ()))
        body = b"# EOF\n" if openmetrics else b""
        if self.snapshot is not None:
            body = self._renderer.render(self.snapshot, openmetrics=openmetrics, names=names or None)
        return Reply(_OPENMETRICS if openmetrics else _TEXT, body)

    def describe(self) -> list[Family]:
        """Return every metric that may come, for a registry to look for clashes."""
        return [_family(metric) for metric in METRICS.values()]

    def collect(self) -> Iterator[Family]:
        """Yield the metrics of the last snapshot."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        constant = {"run": snapshot.run, **snapshot.labels}
        for metric, columns in groupby(snapshot.columns("node"), lambda columns: metric_of(columns.name)):
            family = _family(metric)
            for name, labels, values in columns:
                for own, value in zip(labels, values, strict=True):
                    family.add_sample(name, {**constant, **own}, value)
            yield family


def _family(metric: Metric) -> Family:
    # families without `created` get no _created series, which would double the count of series
    family: Family = _FAMILIES[metric.kind](metric.name, metric.help)  # type: ignore[call-arg]  # of the base alone
    return family

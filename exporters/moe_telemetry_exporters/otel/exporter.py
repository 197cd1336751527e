"""OtelExporter: snapshots to an OpenTelemetry collector, or to the MeterProvider of the program.

    mt.watch(model, "otel")                                             # where OTEL_EXPORTER_OTLP_* says
    mt.watch(model, OtelExporter(endpoint="http://collector:4318"))     # there, in any case

Metrics have the table's names with dots (`moe.router.tokens`), its units, and its labels as attributes, with
`run` and the labels of the configuration, so that Prometheus behind a collector shows the same series as
`PrometheusExporter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry.metrics import MeterProvider, get_meter_provider
from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider

from moe_telemetry.errors import ConfigError
from moe_telemetry.snapshot import Snapshot
from moe_telemetry_exporters.otel.instruments import Publication
from moe_telemetry_exporters.otel.push import Push
from moe_telemetry_exporters.otel.target import Target, otlp_variable
from moe_telemetry_exporters.settings import check_types

__all__ = ["OtelExporter"]

_TEMPORALITIES = ("cumulative", "delta")
# a request holds at least a point with all its labels
_LEAST_REQUEST_BYTES = 10_000


@dataclass(kw_only=True, eq=False)
class OtelExporter:
    """Exports by OTLP, from one process a job, whose counters are those of the whole job.

    Where the program has set a global MeterProvider of the SDK, and no endpoint is given here, the metrics
    are instruments of that provider: when they are sent, and flushed at the end, is then its affair.
    Otherwise each snapshot is sent when it comes.
    """

    endpoint: str | None = field(default=None, repr=False)
    """URL of the receiver; None takes `OTEL_EXPORTER_OTLP_ENDPOINT`, or port 4318 (gRPC: 4317) of this machine."""
    protocol: str | None = None
    """`http/protobuf` or `grpc`; None takes `OTEL_EXPORTER_OTLP_PROTOCOL`, or gRPC for an endpoint of port 4317,
    or else HTTP."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of every request, as an API key; they are never shown."""
    timeout_seconds: float | None = None
    """How long a request may take, tries again included; None takes `OTEL_EXPORTER_OTLP_TIMEOUT` (in seconds, as
    the SDK for Python does), or 2 seconds."""
    temporality: str | None = None
    """`cumulative` or `delta`; None takes `OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE`, or cumulative."""
    service_name: str | None = None
    """`service.name` of the resource; None takes `OTEL_SERVICE_NAME`, or `moe-telemetry`."""
    max_request_bytes: int = 1_000_000
    """Most bytes of a request; larger snapshots go in several. gRPC receivers take 4 MiB, many proxies 1 MiB."""
    scope: str = "job"
    """`job`: one process exports the whole job. `node`: one process a node exports its node's share of the
    counters, to be added up; gauges come from the first node alone."""
    meter_provider: MeterProvider | None = None
    """Make instruments there; None takes the global provider where the program has set one of the SDK."""
    cardinality_limit: int = 2000
    """Most series of one instrument on a provider, whose SDK folds what is more into one point; what is cut is
    logged and counted. Raise it together with a View's `aggregation_cardinality_limit`."""

    _sink: Push | Publication | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_types(self)
        if self.scope not in {"job", "node"}:
            raise ConfigError(f"scope={self.scope!r}: expected 'job' or 'node'")
        if self.temporality not in {None, *_TEMPORALITIES}:
            raise ConfigError(f"temporality={self.temporality!r}: expected one of {', '.join(_TEMPORALITIES)}")
        if self.max_request_bytes < _LEAST_REQUEST_BYTES:
            raise ConfigError(f"max_request_bytes={self.max_request_bytes!r}: expected {_LEAST_REQUEST_BYTES} or more")
        if self.cardinality_limit < 1:
            raise ConfigError(f"cardinality_limit={self.cardinality_limit!r}: expected a whole number, 1 or more")
        target = self._target()
        if self._provider() is None:
            # now, since a program may end before a later import, which then fails
            target.load()

    def start(self) -> None:
        """Choose where to export: the provider that there is now, or a connection of our own."""
        if self._sink is None:
            self._sink = self._make_sink()
        self._sink.start()

    def _make_sink(self) -> Push | Publication:
        provider = self._provider()
        if provider is not None:
            return Publication(provider, scope=self.scope, cardinality_limit=self.cardinality_limit)
        return Push(
            self._target(),
            scope=self.scope,
            service_name=self.service_name,
            max_request_bytes=self.max_request_bytes,
            is_delta=self._is_delta,
        )

    def export(self, snapshot: Snapshot) -> None:
        """Send a snapshot, or show it to the provider's readers.

        Raises:
            ExporterError: the receiver does not have all of it.
        """
        if self._sink is None:
            self._sink = self._make_sink()
        self._sink.export(snapshot)

    def close(self) -> None:
        """Close the connection, or stop reporting to the provider once its readers have the last snapshot."""
        # the sink stays: what a later monitor counts goes on from what is reported, and never falls below it
        if self._sink is not None:
            self._sink.close()

    def _target(self) -> Target:
        return Target.of(
            endpoint=self.endpoint,
            protocol=self.protocol,
            headers=self.headers,
            timeout_seconds=self.timeout_seconds,
        )

    def _provider(self) -> MeterProvider | None:
        if self.meter_provider is not None or self.endpoint is not None:
            return self.meter_provider
        found = get_meter_provider()
        return found if isinstance(found, SdkMeterProvider) else None

    @property
    def _is_delta(self) -> bool:
        stated = self.temporality or otlp_variable("TEMPORALITY_PREFERENCE") or "cumulative"
        return stated.strip().lower() == "delta"

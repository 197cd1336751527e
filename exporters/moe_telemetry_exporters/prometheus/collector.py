"""The last snapshot for a registry of `prometheus_client`, and as text."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import groupby

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from moe_telemetry.catalog import METRICS, Metric, metric_of
from moe_telemetry.snapshot import Snapshot
from moe_telemetry_exporters.prometheus.text import TextRenderer

__all__ = ["SnapshotCollector"]

_FAMILIES: Mapping[str, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class SnapshotCollector:
    """A `prometheus_client` collector over the last snapshot."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self._renderer = TextRenderer()

    def render(self, snapshot: Snapshot | None, *, openmetrics: bool, names: Container[str] | None) -> bytes:
        """Return a snapshot as text; before the first one there is nothing to show."""
        if snapshot is None:
            return b"# EOF\n" if openmetrics else b""
        return self._renderer.render(snapshot, openmetrics=openmetrics, names=names)

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

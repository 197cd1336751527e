"""Streams cut into requests that a receiver takes, as metrics of the OpenTelemetry SDK."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from moe_telemetry._version import __version__
from moe_telemetry.catalog import Metric as TableRow
from moe_telemetry_exporters.otel.streams import Series, Stream, Streams

__all__ = ["SCOPE", "Batch", "batches", "otel_unit"]

SCOPE = "moe_telemetry"
"""Name of the meter, the instrumentation scope of every metric."""

_RESOURCE_BYTES = 4096  # of every request, beside its metrics


class Slice(NamedTuple):
    """Points of a stream, from `start` up to `stop`."""

    stream: Stream
    start: int
    stop: int

    @property
    def series(self) -> Sequence[Series]:
        """The series of these points; a gauge has none."""
        return self.stream.series[self.start * self.stream.width : self.stop * self.stream.width]


class Batch:
    """What goes into one request."""

    def __init__(self, streams: Streams, slices: Sequence[Slice], *, is_delta: bool) -> None:
        self._streams = streams
        self._slices = slices
        self._is_delta = is_delta
        self.num_points = sum(part.stop - part.start for part in slices)

    def data(self, resource: Resource) -> MetricsData:
        """Return the points, as the SDK's exporters take them."""
        metrics = [self._metric(part) for part in self._slices]
        scope = ScopeMetrics(InstrumentationScope(SCOPE, __version__), metrics, "")
        return MetricsData([ResourceMetrics(resource, [scope], resource.schema_url)])

    def commit(self) -> None:
        """Remember that a receiver has these points."""
        for part in self._slices:
            for series in part.series:
                series.sent = series.total
                series.since_ns = self._streams.time_ns

    def _metric(self, part: Slice) -> Metric:
        row = part.stream.metric
        return Metric(row.otel_name, row.help, otel_unit(row), self._data(part))

    def _data(self, part: Slice) -> Gauge | Sum | Histogram:
        temporality = AggregationTemporality.DELTA if self._is_delta else AggregationTemporality.CUMULATIVE
        if part.stream.metric.kind == "gauge":
            return Gauge(list(self._gauge_points(part)))
        if part.stream.metric.kind == "counter":
            return Sum(list(self._sum_points(part)), temporality, is_monotonic=True)
        return Histogram(list(self._histogram_points(part)), temporality)

    def _gauge_points(self, part: Slice) -> Iterator[NumberDataPoint]:
        now_ns = self._streams.time_ns
        for place in range(part.start, part.stop):
            yield NumberDataPoint(part.stream.attributes[place], 0, now_ns, part.stream.values[place])

    def _sum_points(self, part: Slice) -> Iterator[NumberDataPoint]:
        start_ns, now_ns = self._streams.start_ns, self._streams.time_ns
        for attributes, one in zip(part.stream.attributes[part.start : part.stop], part.series, strict=True):
            if self._is_delta:
                yield NumberDataPoint(attributes, one.since_ns, now_ns, one.total - one.sent)
            else:
                yield NumberDataPoint(attributes, start_ns, now_ns, one.total)

    def _histogram_points(self, part: Slice) -> Iterator[HistogramDataPoint]:
        width, bounds = part.stream.width, part.stream.bounds
        for place in range(part.start, part.stop):
            series = part.stream.series[place * width : (place + 1) * width]
            *below, total, count = [one.total - one.sent if self._is_delta else one.total for one in series]
            yield HistogramDataPoint(
                attributes=part.stream.attributes[place],
                start_time_unix_nano=series[0].since_ns if self._is_delta else self._streams.start_ns,
                time_unix_nano=self._streams.time_ns,
                count=int(count),
                sum=total,
                bucket_counts=[int(upper - lower) for lower, upper in pairwise([0, *below])],
                explicit_bounds=bounds,
                min=None,  # type: ignore[arg-type]  # unknown, and optional in OTLP
                max=None,  # type: ignore[arg-type]
            )


def batches(streams: Streams, max_bytes: int, *, is_delta: bool) -> Iterator[Batch]:
    """Yield all points, in batches that encode to less than `max_bytes`; a point is never cut."""
    slices: list[Slice] = []
    room = whole = max_bytes - _RESOURCE_BYTES
    for stream in streams.active:
        start = 0
        room -= stream.head_bytes
        for place, size in enumerate(stream.sizes):
            if size > room and (slices or place > start):
                cut = [Slice(stream, start, place)] if place > start else []
                yield Batch(streams, [*slices, *cut], is_delta=is_delta)
                slices, room, start = [], whole - stream.head_bytes, place
            room -= size
        slices.append(Slice(stream, start, len(stream.sizes)))
    if slices:
        yield Batch(streams, slices, is_delta=is_delta)


def otel_unit(row: TableRow) -> str:
    """Return the UCUM unit of a metric.

    Prometheus receivers add `_ratio` to the name of a gauge of unit 1. So that names there are those of
    the table, a gauge that is no ratio has no unit.
    """
    is_named_ratio = row.name.endswith("_ratio")
    return "" if row.kind == "gauge" and row.unit == "1" and not is_named_ratio else row.unit

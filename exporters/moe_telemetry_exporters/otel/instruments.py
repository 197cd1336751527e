"""Instruments on a MeterProvider of the program's own: its readers collect the last snapshot when they like."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import ClassVar
from weakref import WeakKeyDictionary

from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation

from moe_telemetry._version import __version__
from moe_telemetry.catalog import METRICS
from moe_telemetry.snapshot import Snapshot
from moe_telemetry_exporters.otel.batches import SCOPE, otel_unit
from moe_telemetry_exporters.otel.streams import Stream, Streams

__all__ = ["Instruments", "Publication"]

_logger = logging.getLogger("moe_telemetry")
_HISTOGRAM = METRICS["moe_expert_relative_load"]
_DROPPED = "moe_telemetry_series_dropped_total"


class Instruments:
    """The instruments of one provider, made once: the SDK has no way to take an instrument back."""

    _of_providers: ClassVar[WeakKeyDictionary[MeterProvider, Instruments]] = WeakKeyDictionary()
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, provider: MeterProvider) -> None:
        self._meter = provider.get_meter(SCOPE, __version__)
        self._histogram: Histogram | None = None
        self.publications: list[Publication] = []
        create = {
            "counter": self._meter.create_observable_counter,
            "gauge": self._meter.create_observable_gauge,
        }
        for row in METRICS.values():
            if row.kind in create:
                create[row.kind](row.otel_name, [partial(self._observe, row.name)], otel_unit(row), row.help)

    @classmethod
    def of(cls, provider: MeterProvider) -> Instruments:
        """Return the instruments of a provider."""
        with cls._lock:
            if provider not in cls._of_providers:
                cls._of_providers[provider] = cls(provider)
            return cls._of_providers[provider]

    def histogram(self, bounds: Sequence[float]) -> Histogram:
        """Return the histogram of relative load; the SDK has none that is observed, so values are recorded."""
        if self._histogram is None:
            self._histogram = self._meter.create_histogram(
                _HISTOGRAM.otel_name, _HISTOGRAM.unit, _HISTOGRAM.help, explicit_bucket_boundaries_advisory=bounds
            )
        return self._histogram

    def _observe(self, name: str, _: CallbackOptions) -> Iterable[Observation]:
        return [found for publication in [*self.publications] for found in publication.collect(name)]


class Publication:
    """What one exporter shows on a provider.

    After `close` the last snapshot is still collected once, since readers collect later than a run ends;
    then there is nothing.
    """

    def __init__(self, provider: MeterProvider, *, scope: str, cardinality_limit: int) -> None:
        self._instruments = Instruments.of(provider)
        self._scope = scope
        self._limit = cardinality_limit
        self._streams: Streams | None = None
        self.observations: Mapping[str, Sequence[Observation]] = {}
        self._uncollected: set[str] = set()
        self._is_closed = False
        self._num_dropped = 0
        self._identity: tuple[str, dict[str, str]] | None = None

    def start(self) -> None:
        """Do nothing: instruments show nothing before the first snapshot."""

    def export(self, snapshot: Snapshot) -> None:
        """Show `snapshot` from now on."""
        identity = (snapshot.run, dict(snapshot.labels))
        if self._streams is None or identity != self._identity:
            self._streams, self._identity = Streams(snapshot, 0), identity
        self._streams.take(snapshot, self._scope)
        self._show({stream.metric.name: stream for stream in self._streams.active})
        self._record(snapshot, self._streams)
        if self not in self._instruments.publications:
            self._instruments.publications.append(self)
        self._is_closed = False

    def collect(self, name: str) -> Sequence[Observation]:
        """Return the observations of one metric, for a reader."""
        if self._is_closed and name not in self._uncollected:
            return ()
        self._uncollected.discard(name)
        if self._is_closed and not self._uncollected:
            self._instruments.publications.remove(self)
        return self.observations.get(name, ())

    def close(self) -> None:
        """Show nothing more, once the last snapshot is collected."""
        self._is_closed = True
        if self._streams is not None:
            self._streams.restart()

    def _show(self, streams: Mapping[str, Stream]) -> None:
        whole = {name: [*_observations(stream)] for name, stream in streams.items()}
        found = {name: observations[: self._room(name)] for name, observations in whole.items()}
        self._report({name: len(whole[name]) - len(kept) for name, kept in found.items() if kept != whole[name]})
        if self._num_dropped and _DROPPED in found:
            found[_DROPPED] = [Observation(one.value + self._num_dropped, one.attributes) for one in found[_DROPPED]]
        self.observations, self._uncollected = found, set(found)

    def _room(self, name: str) -> int:
        """Return how many series of a metric the provider takes; it folds what is more into one, without a word."""
        others = [other for other in self._instruments.publications if other is not self]
        return max(0, self._limit - sum(len(other.observations.get(name, ())) for other in others))

    def _report(self, dropped: Mapping[str, int]) -> None:
        if dropped and not self._num_dropped:
            _logger.warning(
                "moe_telemetry: %d series of %s are left out: the MeterProvider of this program takes %d an "
                "instrument. Give it a View with aggregation_cardinality_limit for that instrument and OtelExporter "
                "the same cardinality_limit, or give OtelExporter an endpoint",
                sum(dropped.values()),
                ", ".join(METRICS[name].otel_name for name in dropped),
                self._limit,
            )
        # exported as a counter, so it never falls
        self._num_dropped = max(self._num_dropped, sum(dropped.values()))

    def _record(self, snapshot: Snapshot, streams: Streams) -> None:
        """Record the relative load of every expert in the window."""
        stream = next((one for one in streams.active if one.metric is _HISTOGRAM), None)
        if stream is None:
            return
        histogram = self._instruments.histogram(stream.bounds)
        for attributes, assignments in _windows(snapshot, stream):
            total = sum(assignments)
            for count in assignments if total else ():
                # whole numbers divided once are rounded as the bounds are, so a load on a bound stays on it
                histogram.record(len(assignments) * count / total, attributes)


def _observations(stream: Stream) -> Iterator[Observation]:
    if stream.metric.kind == "histogram":
        return
    values = stream.values if stream.metric.kind == "gauge" else [series.total for series in stream.series]
    yield from map(Observation, values, stream.attributes)


def _windows(snapshot: Snapshot, stream: Stream) -> Iterator[tuple[Mapping[str, str], Sequence[int]]]:
    """Yield (attributes, assignments in the window) of every point of the histogram that grew."""
    places = [(layer, stage) for layer in snapshot.layers.values() for stage in layer.relative_load]
    for attributes, (layer, stage) in zip(stream.attributes, places, strict=True):
        if stage in layer.window:
            yield attributes, layer.window[stage].assignments

"""Streams: what each series of a snapshot adds up to over restarts, and how much of it a receiver has.

A counter that falls has started anew, and its stream goes on from where it was: of the raw totals 10, 30, 60,
and 5 after a restart, the stream has 10, 30, 60, 65.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple, cast

from moe_telemetry.catalog import Metric, metric_of
from moe_telemetry.snapshot import Scope, Snapshot

__all__ = ["Series", "Stream", "Streams"]

Labels = tuple[Mapping[str, str], ...]

# what OTLP adds to the text of an attribute, a point to its attributes, and a metric to its texts, at most
_ATTRIBUTE_BYTES = 16
_POINT_BYTES = 48
_BUCKET_BYTES = 17
_HEAD_BYTES = 64


class Block(NamedTuple):
    """The samples of one metric; those of a histogram's point are neighbours: buckets, sum, count."""

    metric: Metric
    labels: Labels
    values: tuple[float, ...]


class Series:
    """One number that only grows, and how much of it was sent until when."""

    __slots__ = ("offset", "raw", "sent", "since_ns", "total")

    def __init__(self, since_ns: int) -> None:
        self.raw: float = 0
        self.offset: float = 0
        self.total: float = 0
        self.sent: float = 0
        self.since_ns = since_ns

    def take(self, raw: float) -> None:
        """Take a raw total; one below the last is the first of a new count."""
        if raw < self.raw:
            self.offset += self.raw
        self.raw = raw
        self.total = self.offset + raw

    def restart(self) -> None:
        """Take the next raw total as one of a new count."""
        self.offset += self.raw
        self.raw = 0

    def begin_here(self, now_ns: int) -> None:
        """Count from now on: what came before is another stream's."""
        self.offset = -self.raw
        self.total = self.sent = 0
        self.since_ns = now_ns


class Stream:
    """All series of one metric: a point for each set of labels."""

    def __init__(self, metric: Metric, constant: Mapping[str, str], start_ns: int) -> None:
        self.metric = metric
        self.width = 1
        """Series of a point: 1, or the buckets, sum and count of a histogram."""
        self.bounds: Sequence[float] = ()
        """Upper bounds of a histogram's buckets, without the last, which has none."""
        self.attributes: Sequence[Mapping[str, str]] = ()
        """The labels of each point, constant ones included."""
        self.sizes: Sequence[int] = ()
        """Most bytes of each point in a request."""
        self.values: Sequence[float] = ()
        """Of a gauge, the value of each point."""
        self.series: Sequence[Series] = ()
        """Of a counter or histogram, `width` for each point."""
        self.head_bytes = len(metric.name) + len(metric.help.encode()) + _HEAD_BYTES
        """Most bytes of the metric in a request, without its points."""
        self._constant = constant
        self._start_ns = start_ns
        self._labels: Labels = ()
        self._known: dict[tuple[int, frozenset[tuple[str, str]]], Series] = {}

    def take(self, block: Block) -> None:
        """Take the samples of a snapshot; series that are not among them have no points from now on."""
        # the core hands out the same labels each time, so that comparing them is comparing addresses
        if block.labels != self._labels:
            self._relabel(block.labels)
        if self.metric.kind == "gauge":
            self.values = block.values
            return
        if self.metric.kind == "histogram":
            self._restart_together(block.values)
        for series, raw in zip(self.series, block.values, strict=True):
            series.take(raw)

    def known(self) -> Iterator[Series]:
        """Yield every series there ever was."""
        return iter(self._known.values())

    def _relabel(self, labels: Labels) -> None:
        if self.metric.kind == "histogram":
            num_buckets = next(place for place, one in enumerate(labels) if "le" not in one)
            self.bounds = [float(one["le"]) for one in labels[: num_buckets - 1]]
            self.width = num_buckets + 2
        self._labels = labels
        own = labels[self.width - 1 :: self.width]
        self.attributes = [{**self._constant, **{key: _utf8(value) for key, value in one.items()}} for one in own]
        bucket_bytes = _BUCKET_BYTES * self.width
        self.sizes = [_POINT_BYTES + bucket_bytes + _text_bytes(attributes) for attributes in self.attributes]
        if self.metric.kind != "gauge":
            self.series = [self._series_of(place % self.width, one) for place, one in enumerate(labels)]

    def _series_of(self, part: int, labels: Mapping[str, str]) -> Series:
        key = (part, frozenset(labels.items()))
        if key not in self._known:
            self._known[key] = Series(self._start_ns)
        return self._known[key]

    def _restart_together(self, values: Sequence[float]) -> None:
        """Restart every series of a histogram's point where one of them fell."""
        for first in range(0, len(values), self.width):
            part = self.series[first : first + self.width]
            if any(raw < series.raw for series, raw in zip(part, values[first:], strict=False)):
                for series in part:
                    series.restart()


class Streams:
    """All streams of one run in one process."""

    def __init__(self, snapshot: Snapshot, start_ns: int) -> None:
        self.start_ns = min(start_ns, _nanoseconds(snapshot))
        self.time_ns = self.start_ns
        """Time of the last snapshot; it never stands still or goes back, whatever the clock does."""
        self.active: Sequence[Stream] = ()
        """Streams that have points now."""
        self._constant = {key: _utf8(value) for key, value in {"run": snapshot.run, **snapshot.labels}.items()}
        self._streams: dict[str, Stream] = {}

    def take(self, snapshot: Snapshot, scope: str) -> None:
        """Take a snapshot's numbers."""
        self.time_ns = max(_nanoseconds(snapshot), self.time_ns + 1)
        self.active = [self._advanced(block) for block in _blocks(snapshot, cast("Scope", scope))]

    def _advanced(self, block: Block) -> Stream:
        name = block.metric.name
        if name not in self._streams:
            self._streams[name] = Stream(block.metric, self._constant, self.start_ns)
        self._streams[name].take(block)
        return self._streams[name]

    def restart(self) -> None:
        """Take the totals of the next snapshot as those of a new count."""
        for series in self._known():
            series.restart()

    def begin_here(self) -> None:
        """Leave out what was counted so far: a forked process goes on from its parent's totals."""
        self.start_ns = self.time_ns
        for series in self._known():
            series.begin_here(self.time_ns)

    def _known(self) -> Iterator[Series]:
        return chain.from_iterable(stream.known() for stream in self._streams.values())


def _blocks(snapshot: Snapshot, scope: Scope) -> Iterator[Block]:
    for metric, group in groupby(snapshot.columns(scope), lambda columns: metric_of(columns.name)):
        columns = list(group)
        labels = tuple(chain.from_iterable(one.labels for one in columns))
        values = tuple(chain.from_iterable(one.values for one in columns))
        if not all(map(math.isfinite, values)):
            # a value that is none has no point: a receiver would keep it, or the one before
            finite = [pair for pair in zip(labels, values, strict=True) if math.isfinite(pair[1])]
            labels, values = tuple(one for one, _ in finite), tuple(value for _, value in finite)
        if labels:
            yield Block(metric, labels, values)


def _nanoseconds(snapshot: Snapshot) -> int:
    return int(snapshot.time * 1e9)


def _utf8(text: str) -> str:
    """Return the text without what UTF-8 has no bytes for, which would cost the whole request."""
    return text.encode("utf-8", "replace").decode()


def _text_bytes(attributes: Mapping[str, str]) -> int:
    return sum(len(text.encode()) for item in attributes.items() for text in item) + _ATTRIBUTE_BYTES * len(attributes)

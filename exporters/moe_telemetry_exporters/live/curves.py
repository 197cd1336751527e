"""The last hour of a job, a bounded number of points however often it exports, and its curves."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from statistics import median

from moe_telemetry.identity import RouterKey
from moe_telemetry.load import LoadStats
from moe_telemetry.records import LayerSnapshot
from moe_telemetry.snapshot import Snapshot

__all__ = ["MAX_POINTS", "MEASURES", "SPAN_SECONDS", "Curves", "Point", "point_of"]

SPAN_SECONDS = 3600.0
MAX_POINTS = 240
"""Most points of a curve; beyond, the two neighbours that are closest become one."""

MEASURES: Mapping[str, Callable[[float, float], float]] = {
    "max_violation": max,
    "dead": max,
    "load_entropy": min,
    "score_entropy": min,
    "agreement": min,
    "zero_overlap": max,
}
"""What is kept of every layer, and which of two values is the worse one."""

_NOTHING = math.nan


@dataclass(frozen=True)
class Point:
    """One window, or several of them, of which it keeps the worst of every layer."""

    time: float
    """Unix time of its last snapshot."""
    tokens: int
    """Of the job since the start, in this stage."""
    keys: tuple[RouterKey, ...]
    values: Mapping[str, Sequence[float]]
    """By measure, a value a layer, NaN where the window had none."""

    def merged(self, later: Point) -> Point:
        """Return both as one point at the time of the later; layers that only one of them has are the later's."""
        if self.keys != later.keys:
            return later
        values = {
            name: array("f", map(_worse(MEASURES[name]), self.values[name], later.values[name])) for name in MEASURES
        }
        return Point(later.time, later.tokens, later.keys, values)

    # a point is asked for by every request as long as it is kept
    @cached_property
    def spread(self) -> Mapping[str, tuple[float, float] | None]:
        """By measure, the worst layer and the median layer; None where no layer had a value."""
        found = {name: [value for value in self.values[name] if value == value] for name in MEASURES}  # noqa: PLR0124
        return {
            name: (reduce(MEASURES[name], values), median(values)) if values else None for name, values in found.items()
        }

    def of_layer(self, key: RouterKey, name: str) -> float | None:
        """Return the value of one layer, None where there is none."""
        if key not in self.keys:
            return None
        value = self.values[name][self.keys.index(key)]
        return None if math.isnan(value) else value


class Curves:
    """The points of one stage, oldest first; not changed in place, so that a reader may hold on to `points`."""

    def __init__(self) -> None:
        self.points: tuple[Point, ...] = ()

    def add(self, point: Point) -> None:
        """Take the newest point; those older than an hour go."""
        # a clock that was set back must not leave points in the future
        kept = [each for each in self.points if point.time - SPAN_SECONDS <= each.time < point.time]
        kept.append(point)
        if len(kept) > MAX_POINTS:
            # the last point stays by itself, so that the newest value is always the true one
            closest = min(range(1, len(kept) - 2), key=lambda index: kept[index + 1].time - kept[index - 1].time)
            kept[closest : closest + 2] = [kept[closest].merged(kept[closest + 1])]
        self.points = tuple(kept)


def point_of(snapshot: Snapshot, stage: str) -> Point:
    """Return the point of a snapshot's window."""
    rows = [_values(layer, stage) for layer in snapshot.layers.values()]
    values = {name: array("f", [row[index] for row in rows]) for index, name in enumerate(MEASURES)}
    tokens = max((layer.total[stage].tokens for layer in snapshot.layers.values() if stage in layer.total), default=0)
    return Point(snapshot.time, tokens, tuple(snapshot.layers), values)


def _values(layer: LayerSnapshot, stage: str) -> tuple[float, ...]:
    """Return the numbers of one layer in the order of `MEASURES`."""
    counts, replay = layer.window.get(stage), layer.replay
    stats = None if counts is None else LoadStats.of(counts.assignments)
    scores = None if counts is None else counts.scores
    return (
        _NOTHING if stats is None else stats.max_violation,
        _NOTHING if stats is None else stats.dead_experts,
        _NOTHING if stats is None else stats.entropy,
        _number(None if scores is None else scores.entropy),
        _number(None if replay is None else replay.agreement),
        _number(layer.worst_rank_zero_overlap),
    )


def _number(value: float | None) -> float:
    return _NOTHING if value is None else value


def _worse(worse: Callable[[float, float], float]) -> Callable[[float, float], float]:
    def choose(one: float, other: float) -> float:
        if math.isnan(one):
            return other
        return one if math.isnan(other) else worse(one, other)

    return choose

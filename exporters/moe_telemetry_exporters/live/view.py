"""LiveView: what the live page and `moe-telemetry watch` show, as one JSON document.

    view = LiveView()
    view.show(snapshot)             # in the exporter's thread: some references, and one point of the curves
    view.document(layer="decoder.3")    # in the thread of whoever looks

`show` is called by one thread, `document` by any. Memory is bounded however long the run: for each of a few
stages the last snapshot that saw it, and the points of an hour.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from typing import Any

from moe_telemetry.snapshot import Snapshot
from moe_telemetry_exporters.live.alerts import AlertLog, Standing
from moe_telemetry_exporters.live.curves import Curves, Point, point_of
from moe_telemetry_exporters.live.document import Scene, document_of, waiting_document

__all__ = ["MAX_STAGES", "LiveView"]

MAX_STAGES = 8
"""Stages that are kept; of more, those that were counted last."""

_NUM_GAPS = 32
_LATE_GAPS = 5
_LEAST_LATE_SECONDS = 15.0
_LATE_AFTER_ONE_SECONDS = 120.0


@dataclass
class _Stage:
    """What is kept of one stage."""

    snapshot: Snapshot
    """The last one whose window saw the stage: the last window of a run is often empty."""
    arrival: float
    curves: Curves = field(default_factory=Curves)


class LiveView:
    """Keeps what there is to see of a job; a document of it is made when one is asked for."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._stages: dict[str, _Stage] = {}
        self._alerts = AlertLog()
        self._latest: Snapshot | None = None
        self._arrivals: deque[float] = deque(maxlen=_NUM_GAPS)

    def show(self, snapshot: Snapshot) -> None:
        """Show `snapshot` from now on."""
        now = self._clock()
        stages = dict.fromkeys(stage for layer in snapshot.layers.values() for stage in layer.window)
        points = {stage: point_of(snapshot, stage) for stage in [*stages][:MAX_STAGES]}
        with self._lock:
            if self._latest is not None and self._latest.run != snapshot.run:
                self._forget()
            self._latest = snapshot
            self._arrivals.append(now)
            self._alerts.observe(snapshot, now)
            for stage, point in points.items():
                self._add(stage, point, snapshot, now)

    def _forget(self) -> None:
        """Begin anew: curves and alerts of one run are not those of the next at the same endpoint."""
        self._stages, self._alerts = {}, AlertLog()
        self._arrivals.clear()

    def _add(self, stage: str, point: Point, snapshot: Snapshot, now: float) -> None:
        kept = self._stages.setdefault(stage, _Stage(snapshot, now))
        kept.snapshot, kept.arrival = snapshot, now
        kept.curves.add(point)
        if len(self._stages) > MAX_STAGES:
            del self._stages[min(self._stages, key=lambda name: self._stages[name].arrival)]

    def document(self, *, stage: str | None = None, layer: str | None = None) -> dict[str, Any]:
        """Return what there is to see, as plain values without NaN.

        Args:
            stage: of the table, the heatmap and the curves; one that is not there is taken as None: `train`, or
                else the stage with the most tokens.
            layer: a router, as `decoder.3`, to have its own curves as well.
        """
        now = self._clock()
        with self._lock:
            latest = self._latest
            if latest is None:
                return waiting_document(now)
            gap = self._usual_gap()
            standing = self._standing(latest, now, gap)
            shown = {name: (kept.snapshot, kept.arrival, kept.curves.points) for name, kept in self._stages.items()}
            arrival = self._arrivals[-1]
        name = stage if stage in shown else "train" if "train" in shown else _busiest(latest, shown)
        snapshot, seen, points = shown.get(name, (latest, arrival, ()))
        scene = Scene(
            now=now,
            latest=latest,
            age_seconds=max(0.0, now - arrival),
            usual_gap_seconds=gap,
            state=_state(latest, now - arrival, gap),
            standing=standing,
            stage=name,
            stages=tuple(shown),
            snapshot=snapshot,
            window_age_seconds=max(0.0, now - seen),
            points=points,
            layer=layer,
        )
        return document_of(scene)

    def _usual_gap(self) -> float | None:
        arrivals = [*self._arrivals]
        return median(map(float.__sub__, arrivals[1:], arrivals)) if len(arrivals) > 1 else None

    def _standing(self, latest: Snapshot, now: float, gap: float | None) -> tuple[Standing, ...]:
        return () if latest.health.run_finished else self._alerts.at(now, self._arrivals[-1], gap)


def _busiest(latest: Snapshot, stages: dict[str, Any]) -> str:
    def tokens(stage: str) -> int:
        return max((layer.total[stage].tokens for layer in latest.layers.values() if stage in layer.total), default=0)

    return max(stages, key=tokens, default="train")


def _state(latest: Snapshot, age: float, gap: float | None) -> str:
    """Return `finished`, `live`, or `late` where no snapshot came for far longer than usual."""
    if latest.health.run_finished:
        return "finished"
    limit = _LATE_AFTER_ONE_SECONDS if gap is None else max(_LEAST_LATE_SECONDS, _LATE_GAPS * gap)
    return "late" if age > limit else "live"

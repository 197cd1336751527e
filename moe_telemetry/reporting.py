"""Reporting: from the counts of all ranks to a snapshot, and to the exporters.

What fails on the way costs a report, never a step of training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from moe_telemetry.config import TelemetryConfig
from moe_telemetry.delivery import Delivery
from moe_telemetry.history import History
from moe_telemetry.plugins import Exporter, exporter_scope
from moe_telemetry.records import Health
from moe_telemetry.reduce import Reducer
from moe_telemetry.route_control import RouteControl
from moe_telemetry.snapshot import Snapshot
from moe_telemetry.topology import Seat

__all__ = ["Reporting"]

_logger = logging.getLogger("moe_telemetry")


class Reporting:
    """The reducer, the history, and the exporters of one monitor on this rank."""

    def __init__(
        self,
        reducer: Reducer,
        routes: RouteControl,
        seat: Seat,
        run: str,
        exporters: Sequence[tuple[str, Exporter]],
        config: TelemetryConfig,
    ) -> None:
        self.reducer = reducer
        self.overhead_seconds = 0.0
        """What the training thread has spent on telemetry, as far as the monitor knows it."""
        self._routes = routes
        self._seat = seat
        self._run = _utf8(run)
        self._config = config
        self._labels = {name: _utf8(value) for name, value in config.labels.items()}
        self._has_reported_invalid = False
        self._history = History(reducer.layout.routers)
        self.delivery = Delivery(
            [pair for pair in exporters if seat.leads_job or (seat.leads_node and exporter_scope(pair[1]) == "node")]
        )

    def report(self, meeting: str, step: int, slots: Mapping[str, int]) -> Snapshot | None:
        """Reduce and export; None where a rank did not come or anything failed."""
        snapshot = self._try_reduce(meeting, step, slots)
        if snapshot is not None:
            self.delivery.put(snapshot)
        return snapshot

    def finish(self, step: int, slots: Mapping[str, int], timeout_seconds: float) -> None:
        """Reduce a last time, export what there is as the run's last snapshot, and close the exporters."""
        if self._try_reduce("close", step, slots, is_last=True) is None:
            self._history.end_window()  # it was exported already
        self.delivery.put(self._make_snapshot(step, finished=True))
        self.delivery.close(timeout_seconds)

    def _try_reduce(
        self, meeting: str, step: int, slots: Mapping[str, int], *, is_last: bool = False
    ) -> Snapshot | None:
        """Reduce, and keep whatever may fail in it away from training."""
        try:
            return self.reduce(meeting, step, slots, is_last=is_last)
        except Exception as error:  # noqa: BLE001  # a lost connection, a device out of memory
            self.reducer.num_skipped += 1
            _logger.warning("moe_telemetry: a reduction failed, training goes on: %s: %s", type(error).__name__, error)
            return None

    def reduce(self, meeting: str, step: int, slots: Mapping[str, int], *, is_last: bool = False) -> Snapshot | None:
        """Return the counts of all ranks, or None where a rank did not come.

        Args:
            meeting: what the ranks call this reduction.
            step: the number of the training step.
            slots: the stage slot of every stage this rank knows.
            is_last: no other reduction will follow.
        """
        reduced = self.reducer.reduce(meeting, step, slots, is_last=is_last)
        if reduced is None:
            return None
        self._history.advance(reduced)
        if self._seat.leads_job:
            self._routes.judge(self._history.layers)
            self._report_invalid_once()
        return self._make_snapshot(step, finished=False)

    def _report_invalid_once(self) -> None:
        """Say that choices name no expert of their router: what is left of its load may look healthy."""
        layers = self._history.layers
        invalid = {key: sum(counts.invalid for counts in layer.total.values()) for key, layer in layers.items()}
        if self._has_reported_invalid or not any(invalid.values()):
            return
        self._has_reported_invalid = True
        worst = max(invalid, key=lambda key: invalid[key])
        _logger.warning(
            "moe_telemetry: %d choices of router %s name none of its %d experts, and are in no expert's load (%d of %d "
            "routers have such choices): is num_experts right?",
            invalid[worst],
            worst,
            layers[worst].num_experts,
            sum(map(bool, invalid.values())),
            len(invalid),
        )

    def _make_snapshot(self, step: int, *, finished: bool) -> Snapshot:
        return Snapshot(
            run=self._run,
            step=step,
            time=time.time(),
            world_size=self._seat.num_ranks,
            layers=self._history.layers,
            health=self._health(finished=finished),
            labels=self._labels,
            leads=self._seat.leads_job,
            per_expert=self._config.per_expert,
            max_series=self._config.max_series,
            expert_parallel_ranks=self._config.expert_parallel_ranks,
            expert_placement=self._config.expert_placement,
        )

    def _health(self, *, finished: bool) -> Health:
        layers, finding = self._history.layers, self._routes.finding
        return Health(
            routers_expected=len(layers),
            routers_observed=sum(bool(layer.total) for layer in layers.values()),
            run_finished=finished,
            overhead_seconds=self.overhead_seconds,
            skipped_reductions=self.reducer.num_skipped,
            export_errors=self.delivery.errors,
            misalignment=None if finding is None else finding.cause,
            misalignment_offset=0 if finding is None else finding.offset,
        )


def _utf8(text: str) -> str:
    """Return the text without what UTF-8 has no bytes for: it may come from a variable in another encoding."""
    return text.encode(errors="replace").decode()

"""Carry snapshots to exporters, each in a thread of its own, so that no sink can touch training."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from moe_telemetry.plugins import Exporter
from moe_telemetry.snapshot import Snapshot

__all__ = ["Delivery"]

_logger = logging.getLogger("moe_telemetry")
_QUEUE_LENGTH = 64
_SECONDS_BETWEEN_LOGS = 60.0


class Lane:
    """One exporter, its queue and its thread."""

    def __init__(self, name: str, exporter: Exporter) -> None:
        self.name = name
        self.num_errors = 0
        self._exporter = exporter
        self._queue: queue.Queue[Snapshot | None] = queue.Queue()
        self._lock = threading.Lock()
        self._last_log = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"moe-telemetry-{name}", daemon=True)
        self._thread.start()

    def put(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot without waiting; where the queue is full, its oldest is lost and counted."""
        if self._queue.qsize() >= _QUEUE_LENGTH:
            with suppress(queue.Empty):  # the newest has all totals, and the last says that the run is finished
                self._queue.get_nowait()
                self._fail(f"is {_QUEUE_LENGTH} snapshots behind; the oldest is lost")
        self._queue.put(snapshot)

    def finish(self) -> None:
        """Let the thread end once its queue is empty; nothing is put after this."""
        self._queue.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the thread until `deadline` (monotonic seconds), then leave it."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail("did not finish in time; its last snapshots may be lost")

    def _run(self) -> None:
        # a sink that cannot start stays off: retrying every step would only repeat the failure
        is_on = self._attempt("start", getattr(self._exporter, "start", None))
        while (snapshot := self._queue.get()) is not None:
            if is_on:
                self._attempt("export", self._exporter.export, snapshot)
        self._attempt("close", self._exporter.close)

    def _attempt(self, what: str, method: object, *args: Snapshot) -> bool:
        """Call a method of the exporter; whatever it raises ends here."""
        try:
            if callable(method):
                method(*args)
        except BaseException as error:  # noqa: BLE001  # a sink may raise anything, SystemExit too, and training goes on
            self._fail(f"failed to {what}: {type(error).__name__}: {error}")
            return False
        return True

    def _fail(self, message: str) -> None:
        now = time.monotonic()
        with self._lock:  # both threads fail, and none of it may be counted once
            self.num_errors += 1
            num_errors, is_quiet = self.num_errors, now - self._last_log < _SECONDS_BETWEEN_LOGS
            self._last_log = self._last_log if is_quiet else now
        if not is_quiet:
            _logger.warning("moe_telemetry: exporter %s %s (failure %d)", self.name, message, num_errors)


class Delivery:
    """All exporters of a monitor on this rank."""

    def __init__(self, exporters: Sequence[tuple[str, Exporter]]) -> None:
        names = [name for name, _ in exporters]
        self._lanes = [
            Lane(name if names.index(name) == place else f"{name}-{names[:place].count(name) + 1}", exporter)
            for place, (name, exporter) in enumerate(exporters)
        ]

    def put(self, snapshot: Snapshot) -> None:
        """Hand a snapshot to every exporter; the caller never waits."""
        for lane in self._lanes:
            lane.put(snapshot)

    @property
    def errors(self) -> dict[str, int]:
        """Failures so far, by exporter."""
        return {lane.name: lane.num_errors for lane in self._lanes}

    def close(self, timeout_seconds: float) -> None:
        """Let every exporter finish and close; together they get `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        for lane in self._lanes:  # all of them before any is waited for: one that hangs takes no time from others
            lane.finish()
        for lane in self._lanes:
            lane.join(deadline)

"""A connection of our own: every snapshot is sent when it comes, and what fails is sent with the next."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource

from moe_telemetry.errors import ExporterError
from moe_telemetry.snapshot import Snapshot
from moe_telemetry_exporters.otel.batches import Batch, batches
from moe_telemetry_exporters.otel.connection import Connection
from moe_telemetry_exporters.otel.resource import make_resource
from moe_telemetry_exporters.otel.streams import Streams
from moe_telemetry_exporters.otel.target import Target

__all__ = ["Push"]

_LONGEST_REASON = 600
"""Of all requests together: the SDK quotes a metric that it cannot encode, with every point of it."""


class Push:
    """Sends snapshots to an OTLP receiver.

    A receiver that failed twice in a row is left alone for as long as an attempt may take, so that a
    queue of snapshots passes; the last snapshot of a run is tried in any case.
    """

    def __init__(
        self, target: Target, *, scope: str, service_name: str | None, max_request_bytes: int, is_delta: bool
    ) -> None:
        self._target = target
        self._scope = scope
        self._service_name = service_name
        self._max_request_bytes = max_request_bytes
        self._is_delta = is_delta
        self._start_ns = time.time_ns()
        self._process = os.getpid()
        self._identity: tuple[str, dict[str, str]] | None = None
        self._streams: Streams | None = None
        self._resource = Resource.get_empty()
        self._connection: Connection | None = None
        self._num_failures = 0
        self._rest_until = 0.0

    def start(self) -> None:
        """Make the connection, which imports what it needs; nothing is sent yet."""
        if self._connection is None:
            self._connection = Connection(self._target)

    def export(self, snapshot: Snapshot) -> None:
        """Send a snapshot, in as many requests as it needs.

        Raises:
            ExporterError: the receiver does not have all of it.
        """
        streams = self._identified(snapshot)
        streams.take(snapshot, self._scope)
        if time.monotonic() < self._rest_until and not snapshot.health.run_finished:
            raise ExporterError(
                f"{self._target.shown} failed {self._num_failures} times in a row, so this snapshot is not sent; "
                "its counts go with a later one"
            )
        self._send_all([*batches(streams, self._max_request_bytes, is_delta=self._is_delta)])

    def close(self) -> None:
        """Close the connection; what comes after a close is of another monitor, which counts anew."""
        if self._connection is not None and self._process == os.getpid():
            self._connection.close()
        self._connection = None
        self._start_ns = time.time_ns()
        if self._streams is not None:
            self._streams.restart()

    def _send_all(self, requests: Sequence[Batch]) -> None:
        deadline = time.monotonic() + self._target.timeout_seconds
        failures: list[str] = []
        for request in requests:
            # a receiver that fails at once may take the others; one that does not answer will not
            if failures and time.monotonic() >= deadline:
                failures.append("the rest was not tried")
                break
            try:
                failures += filter(None, [self._send(request)])
            except ExporterError as error:
                failures.append(str(error))
        self._count(has_failed=bool(failures))
        if failures:
            told = "; ".join(dict.fromkeys(failures))
            told = told if len(told) <= _LONGEST_REASON else f"{told[:_LONGEST_REASON]}..."
            raise ExporterError(f"{told} (of {len(requests)} requests)" if len(requests) > 1 else told)

    def _send(self, request: Batch) -> str:
        self.start()
        assert self._connection is not None  # noqa: S101
        refused = self._connection.send(request.data(self._resource))
        # also what was refused for good: sending it again would only repeat the refusal
        request.commit()
        return refused

    def _count(self, *, has_failed: bool) -> None:
        self._num_failures = self._num_failures + 1 if has_failed else 0
        if self._num_failures > 1:
            self._rest_until = time.monotonic() + self._target.timeout_seconds

    def _identified(self, snapshot: Snapshot) -> Streams:
        """Return the streams of this run in this process."""
        identity = (snapshot.run, dict(snapshot.labels))
        is_forked = self._process != os.getpid()
        if self._streams is None or identity != self._identity:
            self._streams = Streams(snapshot, self._start_ns)
        elif not is_forked:
            return self._streams
        else:
            self._streams.begin_here()
        if is_forked:
            # not closed: its sockets and threads are the parent's
            self._connection = None
            self._process = os.getpid()
        self._identity = identity
        self._resource = make_resource(snapshot.run, self._service_name)
        return self._streams

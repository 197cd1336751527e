"""RouteWriter: the thread that turns traced calls into parts, away from training.

A part ends by its size or its age, so that a run that is killed loses no more than the last seconds. What
the disk does not take is counted, and writing goes on with the next part.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from moe_telemetry.errors import TraceError
from moe_telemetry.trace.calls import Budget, TracedCall
from moe_telemetry.trace.format import part_name, schema_for, tensor_name
from moe_telemetry.trace.manifest import Manifest, manifest_name
from moe_telemetry.trace.parts import row_of, whole_file, write_part
from moe_telemetry.trace.rows import TraceRow

__all__ = ["PART_BYTES", "PART_SECONDS", "RouteWriter", "write_manifest"]

PART_BYTES = 64 * 2**20
"""Size in memory at which a part ends."""

PART_SECONDS = 3.0
"""Age at which a part ends."""

_logger = logging.getLogger("moe_telemetry")
_SECONDS_BETWEEN_LOGS = 60.0
_ONCE_A_STEP = {"router_weights", "expert_bias"}


class RouteWriter:
    """Writes the parts of one rank."""

    def __init__(self, folder: Path, manifest: Manifest, budget: Budget, describe: Callable[[bool], Manifest]) -> None:
        """Write the manifest, and start the thread.

        Args:
            folder: where the trace goes.
            manifest: of this rank, as it is at the start.
            budget: gets back what written calls have taken of it.
            describe: returns the manifest as it is now, given whether the capture is over.

        Raises:
            OSError: the folder cannot be made, or nothing can be written there.
            TraceError: it holds a trace of this rank, or of another run.
        """
        _refuse_other_traces(folder, manifest)
        self.calls_failed = self.choices_over_top_k = 0
        self.num_calls = self.num_parts = self.num_bytes = 0
        self._folder = folder
        self._rank = manifest.rank
        self._schema = schema_for(max((router.num_experts for router in manifest.routers), default=1))
        self._budget = budget
        self._describe = describe
        self._rows: list[TraceRow] = []
        self._tensors: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._deadline = 0.0
        self._last_log = float("-inf")
        write_manifest(folder, manifest)
        # bounded in bytes, by the budget
        self._queue: queue.SimpleQueue[tuple[int, Sequence[TracedCall]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moe-telemetry-trace", daemon=True)
        self._thread.start()

    def put(self, step: int, calls: Sequence[TracedCall]) -> None:
        """Hand over the calls of a step, without waiting."""
        self._queue.put((step, calls))

    def finish(self) -> None:
        """Have the thread end once it has written what it was given, without waiting."""
        self._queue.put(None)

    def join(self, timeout_seconds: float) -> None:
        """Wait for the thread to end; one that is too slow is left, with a warning."""
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            _logger.warning(
                "moe_telemetry: trace %s: the disk did not take the last calls within %g s; they may be lost",
                self._folder,
                timeout_seconds,
            )

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, self._deadline - time.monotonic()) if self._rows else None)
            except queue.Empty:
                self._end_part()
                continue
            if item is None:
                break
            step, calls = item
            for call in calls:
                self._add(step, call)
        self._end_part()
        self._update_manifest(is_complete=True)
        self._report()

    def _add(self, step: int, call: TracedCall) -> None:
        try:
            call.wait()
            row = row_of(call, step=step, rank=self._rank)
            self.choices_over_top_k += 0 if call.excess is None else int(call.excess)
        except Exception as error:  # noqa: BLE001  # a device that has failed
            self._budget.give_back(call.num_bytes)
            self._fail(1, error)
            return
        names = {
            what: tensor_name(what, step, 0 if what in _ONCE_A_STEP else call.microbatch, call.key)
            for what in call.tensors
        }
        if not self._tensors.keys().isdisjoint(names.values()):
            # a step that was rolled back has its number twice
            self._end_part()
        if not self._rows:
            self._deadline = time.monotonic() + PART_SECONDS
        self._rows.append(row)
        self._tensors |= {names[what]: tensor for what, tensor in call.tensors.items()}
        self._held_bytes += call.num_bytes
        if self._held_bytes >= PART_BYTES or time.monotonic() >= self._deadline:
            self._end_part()

    def _end_part(self) -> None:
        """Write what has come together."""
        if not self._rows:
            return
        rows, tensors, held_bytes = self._rows, self._tensors, self._held_bytes
        self._rows, self._tensors, self._held_bytes = [], {}, 0
        try:
            self.num_bytes += write_part(self._folder, self._rank, self.num_parts, rows, tensors, self._schema)
            self.num_parts += 1
            self.num_calls += len(rows)
        except Exception as error:  # noqa: BLE001  # a full disk, a folder removed, a server that is gone
            self._fail(len(rows), error)
        finally:
            self._budget.give_back(held_bytes)
        self._update_manifest(is_complete=False)

    def _update_manifest(self, *, is_complete: bool) -> None:
        try:
            write_manifest(self._folder, self._describe(is_complete))
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(0, error)

    def _fail(self, num_calls: int, error: Exception) -> None:
        self.calls_failed += num_calls
        now = time.monotonic()
        if now - self._last_log >= _SECONDS_BETWEEN_LOGS:
            self._last_log = now
            _logger.warning(
                "moe_telemetry: trace %s: %d router calls are lost so far: %s: %s",
                self._folder,
                self.calls_failed,
                type(error).__name__,
                error,
            )

    def _report(self) -> None:
        left_out = self._describe(True).left_out
        _logger.log(
            logging.WARNING if left_out.has_losses else logging.INFO,
            "moe_telemetry: trace %s: %d router calls in %d parts, %.1f MB; left out: %s",
            self._folder,
            self.num_calls,
            self.num_parts,
            self.num_bytes / 1e6,
            left_out,
        )


def _refuse_other_traces(folder: Path, manifest: Manifest) -> None:
    """Let the ranks of one job share a folder, and nobody else."""
    if (folder / manifest_name(manifest.rank)).exists() or (folder / part_name(manifest.rank, 0)).exists():
        raise TraceError(f"trace: {folder} holds a trace already: name another folder, or remove this one")
    for path in folder.glob(manifest_name(0).replace("00000", "*")):
        if Manifest.from_json(path.read_bytes()).topology != manifest.topology:
            raise TraceError(f"trace: {folder} holds the trace of another run: name another folder, or remove this one")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a rank's manifest in place of an earlier one.

    Raises:
        OSError: the folder cannot be made, or nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / manifest_name(manifest.rank)) as path:
        path.write_text(manifest.to_json(), encoding="utf-8")

"""Rows in the history of a W&B run that the training loop logs to as well, without a row of either one lost.

A run has one row open at a time. Whoever logs with `step=` expects that row to stay open until its step is over:
committing it for our sake moves the run's step on, and W&B drops what the loop then logs for the step before. So a
row of ours joins the open row and leaves it open. Where the open row has one of ours already, the next is held back
until the loop has moved on; a loop that logs seldom is not waited for longer than `hold_seconds`, for by then its
next step is far ahead.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

__all__ = ["STEP_KEY", "Row", "Rows"]

STEP_KEY = "moe/step"
"""The training step of a row; charts of `moe/*` are over it."""
_MOST_HELD = 64

Row = dict[str, Any]


class Rows:
    """Writes rows to one run."""

    def __init__(self, run: Any, *, is_own: bool, hold_seconds: float = 10.0) -> None:  # noqa: ANN401  # a wandb.Run
        self._run = run
        self._hold_seconds = hold_seconds
        # in shared mode every writer has rows of its own
        self._is_alone = is_own or run.settings.mode == "shared"
        self._step_when_alone: int | None = None
        self._used_step: int | None = None
        self._last_step: int | None = None
        self._held: deque[tuple[float, Row]] = deque()

    def write(self, row: Row) -> None:
        """Write one row, or hold it back for a while."""
        if self._is_alone and not self._others_log():
            self._run.log(row, commit=True)
            self._step_when_alone = self._step()
            return
        self._is_alone = False
        self._held.append((time.monotonic(), row))
        while self._held and (self._is_free(self._held[0][1]) or self._is_late()):
            self._put(self._held.popleft()[1])

    def flush(self) -> None:
        """Write all that is held back."""
        while self._held:
            self._put(self._held.popleft()[1])

    def forget(self) -> int:
        """Drop all that is held back, and return how much it was: the run is finished."""
        num_held = len(self._held)
        self._held.clear()
        return num_held

    def _others_log(self) -> bool:
        """Tell whether somebody else has logged to a run that we had for ourselves."""
        return self._step_when_alone is not None and self._step() != self._step_when_alone

    def _is_free(self, row: Row) -> bool:
        """Tell whether the open row has none of ours, or one of the same training step."""
        return row[STEP_KEY] == self._last_step or self._step() != self._used_step

    def _is_late(self) -> bool:
        return len(self._held) > _MOST_HELD or time.monotonic() - self._held[0][0] > self._hold_seconds

    def _put(self, row: Row) -> None:
        if not self._is_free(row):
            self._run.log({}, commit=True)
        self._run.log(row, commit=False)
        # read after logging: a step that moved on in between makes us wait, and never write over a row of ours
        self._used_step = self._step()
        self._last_step = row[STEP_KEY]

    def _step(self) -> int | None:
        return None if self._run.settings.mode == "shared" else int(self._run.step)

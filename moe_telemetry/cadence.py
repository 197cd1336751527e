"""Which steps reduce: the count of optimizer steps, and every how many of them ranks meet."""

from __future__ import annotations

import logging
import operator

from moe_telemetry.errors import ConfigError

__all__ = ["Cadence"]

_logger = logging.getLogger("moe_telemetry")


class Cadence:
    """Follows the step numbers of one training loop.

    A reduction is due whenever the number passes a multiple of `every_n_steps`. It goes by the number and
    not by the calls, so that a rank that missed a call meets the others again at the next one.
    """

    def __init__(self, every_n_steps: int) -> None:
        self._every = every_n_steps
        self._last: int | None = None
        self._stride = 1
        self._rollbacks = 0

    @property
    def step(self) -> int:
        """The number of the last step; 0 before the first."""
        return self._last or 0

    @property
    def coming(self) -> int:
        """The number of the step after this one, if numbers go on as they do."""
        return self.step + self._stride

    @property
    def meeting(self) -> str:
        """What the ranks call the reduction that is due now."""
        return f"step/{self._rollbacks}/{self.step // self._every}"

    @property
    def is_due_next(self) -> bool:
        """Whether the step after this one will reduce, if numbers go on as they do."""
        return self._passes(self.step, self.coming)

    def advance(self, step: int | None) -> bool:
        """Take the next step, and tell whether it reduces; None counts on from the last.

        Raises:
            ConfigError: the step is no whole number.
        """
        now = self.step + 1 if step is None else _whole(step)
        before = now - 1 if self._last is None else self._last
        if now <= before:
            # a trainer that went back to a checkpoint: rare, and no reason to stop
            self._rollbacks += 1
            _logger.warning("moe_telemetry: step() went from %d back to %d; counters go on as they are", before, now)
            before = now - 1
        self._last, self._stride = now, now - before
        return self._passes(before, now)

    def _passes(self, before: int, now: int) -> bool:
        return now // self._every != before // self._every


def _whole(step: int) -> int:
    try:
        return operator.index(step)
    except TypeError as error:
        raise ConfigError(f"step({step!r}): expected a whole number, or None to count on") from error

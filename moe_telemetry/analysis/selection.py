"""Selection: which tokens of a trace an analysis looks at."""

from __future__ import annotations

from dataclasses import dataclass

from moe_telemetry.errors import ConfigError

__all__ = ["FIRST_STEP", "Selection"]

FIRST_STEP, _STOP_STEP = -(2**63), 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A stage, a range of steps, and decode tokens alone; by default everything."""

    stage: str | None = None
    """Only calls of this stage; None takes all, each stage by itself."""
    decode: bool = False
    """Only tokens whose sequence in their call is one token long."""
    steps: tuple[int | None, int | None] = (None, None)
    """First step, and the first one that is left out again; None is open."""

    def __post_init__(self) -> None:
        """Check the range.

        Raises:
            ConfigError: it holds no step.
        """
        if self.start >= self.stop:
            raise ConfigError(f"steps={self.steps}: expected a first step below the one that is left out again")

    @property
    def start(self) -> int:
        """The first step that may be taken."""
        return FIRST_STEP if self.steps[0] is None else self.steps[0]

    @property
    def stop(self) -> int:
        """The first step beyond those that may be taken."""
        return _STOP_STEP if self.steps[1] is None else self.steps[1]

    def may_take(self, first_step: int, last_step: int) -> bool:
        """Tell whether a stretch of steps, ends included, can hold any that is taken."""
        return first_step < self.stop and last_step >= self.start

    def __str__(self) -> str:
        """Return the options of the command line that make it; empty for everything."""
        words = [f"--stage {self.stage}"] if self.stage is not None else []
        words += ["--decode"] if self.decode else []
        if self.steps != (None, None):
            words.append("--steps " + ":".join("" if step is None else str(step) for step in self.steps))
        return " ".join(words)

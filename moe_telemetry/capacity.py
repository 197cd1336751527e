"""What an expert capacity keeps and drops of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_telemetry.errors import ConfigError

__all__ = ["CapacityDrops"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityDrops:
    """A load cut at a capacity; slots that padding fills up to the capacity are no assignments."""

    kept: tuple[int, ...]
    """Assignments per expert that are dispatched, length E."""
    dropped: tuple[int, ...]
    """Assignments per expert that are not, length E."""

    @classmethod
    def of(cls, assignments: Sequence[int], capacity: int) -> CapacityDrops:
        """Return what a capacity of `capacity` assignments per expert leaves of a load.

        Raises:
            ConfigError: the capacity is negative.
        """
        if capacity < 0:
            raise ConfigError(f"capacity={capacity}; expected assignments per expert, 0 or more")
        kept = tuple(min(load, capacity) for load in assignments)
        return cls(kept=kept, dropped=tuple(load - left for load, left in zip(assignments, kept, strict=True)))

    @property
    def total_dropped(self) -> int:
        """Assignments dropped over all experts."""
        return sum(self.dropped)

    @property
    def drop_ratio(self) -> float | None:
        """Dropped over all assignments, None where there are none."""
        total = sum(self.kept) + self.total_dropped
        return self.total_dropped / total if total else None

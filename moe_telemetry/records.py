"""The plain, frozen values that a snapshot is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_telemetry.replay_totals import ReplayTotals
from moe_telemetry.score_statistics import ScoreStatistics

__all__ = ["Counts", "Health", "LayerSnapshot", "Share"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What the ranks of one endpoint counted of a router, without the split by expert."""

    tokens: int = 0
    padding_tokens: int = 0
    assignments: int = 0
    dropped: int = 0
    invalid: int = 0
    replay: ReplayTotals | None = None
    """None where nothing was replayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What all ranks counted of one router in one stage, over a window or since the start."""

    tokens: int = 0
    """Valid tokens."""
    padding_tokens: int = 0
    """Tokens that the mask calls padding."""
    assignments: tuple[int, ...]
    """Assignments per expert, length E, all K choices of valid tokens."""
    dropped: int = 0
    """Assignments chosen but not dispatched (capacity)."""
    invalid: int = 0
    """Expert ids outside 0..E-1."""
    replay: ReplayTotals | None = None
    """The replay check; None where nothing was replayed."""
    scores: ScoreStatistics | None = None
    """Statistics of the scores, in steps that were sampled; None where none were seen."""
    microbatch_max_violation: float | None = None
    """Mean of MaxVio over the router's calls in steps that were sampled, each rank's calls by themselves."""

    @property
    def is_empty(self) -> bool:
        """True where no token was seen, padding included."""
        return not (self.tokens or self.padding_tokens)

    def as_share(self) -> Share:
        """Return the same counts with the experts added up."""
        return Share(
            tokens=self.tokens,
            padding_tokens=self.padding_tokens,
            assignments=sum(self.assignments),
            dropped=self.dropped,
            invalid=self.invalid,
            replay=self.replay,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSnapshot:
    """One router: counts by stage (`train`, `eval`, ...), for stages that saw a token."""

    num_experts: int
    total: Mapping[str, Counts]
    """Since the start, over all ranks."""
    window: Mapping[str, Counts]
    """Since the snapshot before, over all ranks."""
    share: Mapping[str, Share]
    """Since the start, over the ranks that this endpoint speaks for."""
    worst_rank_zero_overlap: float | None = None
    """Zero-overlap ratio of the window on the rank where it is largest; None where nothing was checked."""
    relative_load: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By stage, how many experts had at most each of `RELATIVE_LOAD_BUCKETS`, all windows since the start added up."""

    @property
    def replay(self) -> ReplayTotals | None:
        """The replay check of the window, all stages together; None where nothing was replayed."""
        found = [counts.replay for counts in self.window.values() if counts.replay is not None]
        return sum(found[1:], found[0]) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """How telemetry itself is doing, as seen by the rank that exports."""

    routers_expected: int
    routers_observed: int
    run_finished: bool = False
    overhead_seconds: float = 0.0
    skipped_reductions: int = 0
    export_errors: Mapping[str, int] = field(default_factory=dict)
    """Failures by exporter name."""
    misalignment: str | None = None
    """The cause of misalignment last found in replayed routes; None where none was looked for."""
    misalignment_offset: int = 0
    """By how many rows or layers the replayed routes come late."""

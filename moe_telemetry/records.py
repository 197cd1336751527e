"""The plain, frozen values that a snapshot is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Counts", "Health", "LayerSnapshot", "Share"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What the ranks of one endpoint counted of a router, without the split by expert."""

    tokens: int = 0
    padding_tokens: int = 0
    assignments: int = 0
    dropped: int = 0
    invalid: int = 0


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

    def __sub__(self, earlier: Counts) -> Counts:
        """Return what was counted after `earlier`."""
        return Counts(
            tokens=self.tokens - earlier.tokens,
            padding_tokens=self.padding_tokens - earlier.padding_tokens,
            assignments=tuple(now - then for now, then in zip(self.assignments, earlier.assignments, strict=True)),
            dropped=self.dropped - earlier.dropped,
            invalid=self.invalid - earlier.invalid,
        )

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

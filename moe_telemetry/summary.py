"""One snapshot in a few numbers: the worst layer, the hottest and the dead experts, the spread over layers.

summary = JobSummary.of(snapshot, period="total")
print(summary.tokens, summary.hottest_experts(3), summary.dead_experts)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moe_telemetry.catalog import Sample, metric_of
from moe_telemetry.identity import RouterKey
from moe_telemetry.load import LoadStats, hottest_experts
from moe_telemetry.records import Counts
from moe_telemetry.snapshot import Snapshot

__all__ = [
    "Expert",
    "HotExpert",
    "JobSummary",
    "LayerLoad",
    "Period",
    "Spread",
    "is_of_layer",
    "spread_over_layers",
    "tokens_by_stage",
]

Period = Literal["window", "total"]
"""Since the snapshot before, or since the start."""


class Expert(NamedTuple):
    """One expert of a job."""

    router: RouterKey
    expert: int

    def __str__(self) -> str:
        """Return `block.layer/expert`, as in `decoder.3/17`."""
        return f"{self.router}/{self.expert}"


class HotExpert(NamedTuple):
    """An expert, and its share (0 to 1) of all assignments of its router."""

    expert: Expert
    share: float


class Spread(NamedTuple):
    """How the values of one metric spread over the layers of a job."""

    mean: float
    max: float
    min: float
    p90: float
    """The smallest value that at least nine tenths of the layers do not exceed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """What one router placed in a period, and how evenly."""

    router: RouterKey
    counts: Counts
    stats: LoadStats

    def hottest_experts(self, count: int) -> list[HotExpert]:
        """Return its `count` most loaded experts, hottest first."""
        ranked = hottest_experts(self.counts.assignments, count)
        return [HotExpert(Expert(self.router, expert), share) for expert, share in ranked]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSummary:
    """All routers of a job in one stage and one period."""

    stage: str
    tokens: int
    """Valid tokens of the job: as many as the router with the most has seen, for all see the same ones."""
    layers: tuple[LayerLoad, ...]
    """Routers that placed anything, in the order of the model."""

    @classmethod
    def of(cls, snapshot: Snapshot, *, period: Period = "window", stage: str | None = None) -> JobSummary:
        """Return the summary of one stage; None takes `train`, or where it saw no token the stage with the most."""
        tokens = tokens_by_stage(snapshot, period)
        chosen = stage or max(tokens, key=lambda name: (name == "train", tokens[name]), default="train")
        layers = [
            LayerLoad(router=router, counts=counts, stats=stats)
            for router, counts in _counts(snapshot, period, chosen)
            if (stats := LoadStats.of(counts.assignments)) is not None
        ]
        return cls(stage=chosen, tokens=tokens.get(chosen, 0), layers=tuple(layers))

    @property
    def worst_layer(self) -> LayerLoad | None:
        """The layer with the largest MaxVio; the first of equals, None where nothing was placed."""
        return max(self.layers, key=lambda layer: layer.stats.max_violation, default=None)

    def hottest_experts(self, count: int) -> list[HotExpert]:
        """Return the `count` experts with the largest share of their own router's assignments."""
        candidates = [hot for layer in self.layers for hot in layer.hottest_experts(count)]
        return heapq.nsmallest(count, candidates, key=lambda hot: (-hot.share, hot.expert.router.order))

    @property
    def dead_experts(self) -> list[Expert]:
        """The experts that received nothing, of routers that placed something."""
        return [
            Expert(layer.router, expert)
            for layer in self.layers
            for expert, assignments in enumerate(layer.counts.assignments)
            if not assignments
        ]


def tokens_by_stage(snapshot: Snapshot, period: Period) -> dict[str, int]:
    """Return the valid tokens of the job by stage, of stages that saw one."""
    tokens: dict[str, int] = {}
    for layer in snapshot.layers.values():
        for stage, counts in _of_period(layer.window, layer.total, period).items():
            tokens[stage] = max(tokens.get(stage, 0), counts.tokens)
    return {stage: count for stage, count in tokens.items() if count}


def is_of_layer(sample: Sample) -> bool:
    """Tell whether a sample is one number about one layer: not about an expert, a bucket or the process."""
    is_single = "layer" in sample.labels and sample.labels.keys() <= {"stage", "block", "layer"}
    return is_single and metric_of(sample.name).kind != "histogram"


def spread_over_layers(samples: Iterable[Sample]) -> dict[tuple[str, str], Spread]:
    """Return the spread of every metric that has one number a layer, by (metric name, stage)."""
    values: dict[tuple[str, str], list[float]] = {}
    for sample in filter(is_of_layer, samples):
        values.setdefault((sample.name, sample.labels.get("stage", "train")), []).append(sample.value)
    return {key: _spread(sorted(found)) for key, found in values.items()}


def _spread(ascending: Sequence[float]) -> Spread:
    return Spread(
        mean=math.fsum(ascending) / len(ascending),
        max=ascending[-1],
        min=ascending[0],
        p90=ascending[math.ceil(0.9 * len(ascending)) - 1],
    )


def _counts(snapshot: Snapshot, period: Period, stage: str) -> Iterable[tuple[RouterKey, Counts]]:
    for router, layer in snapshot.layers.items():
        stages = _of_period(layer.window, layer.total, period)
        if stage in stages:
            yield router, stages[stage]


def _of_period(window: Mapping[str, Counts], total: Mapping[str, Counts], period: Period) -> Mapping[str, Counts]:
    return window if period == "window" else total

"""Snapshot: the frozen, torch-free result of one reduction; all that an exporter ever sees."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, Literal

from moe_telemetry._version import __version__
from moe_telemetry.catalog import Columns, Sample
from moe_telemetry.errors import SnapshotError
from moe_telemetry.identity import RouterKey
from moe_telemetry.records import Counts, Health, LayerSnapshot, Share
from moe_telemetry.replay_samples import replay_counter_samples, replay_gauge_samples
from moe_telemetry.replay_totals import ReplayTotals
from moe_telemetry.samples import counter_samples, expert_columns, gauge_samples, health_samples
from moe_telemetry.score_samples import (
    histogram_samples,
    load_shape_samples,
    rank_loads,
    rank_samples,
    score_samples,
)
from moe_telemetry.score_statistics import ScoreStatistics

__all__ = ["SCHEMA", "Scope", "Snapshot"]

SCHEMA = 1
"""Number of the serialised form; a reader refuses any other."""

Scope = Literal["job", "node"]
"""Whose numbers to export: the whole job's, or this node's share of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What all routers of a job have counted at one training step."""

    run: str
    """Id of the run, the same on all ranks."""
    step: int
    time: float
    """Unix time in seconds."""
    world_size: int
    layers: Mapping[RouterKey, LayerSnapshot]
    """Every router of the job in the order of the model, whichever rank owns it."""
    health: Health
    labels: Mapping[str, str] = field(default_factory=dict)
    """Constant labels of the run, `run` itself not among them."""
    leads: bool = True
    """True at the job's first endpoint, which alone exports what is about the job as a whole."""
    per_expert: bool = False
    max_series: int = 50_000
    expert_parallel_ranks: int | None = None
    """Ranks that the experts of a layer are spread over; None where that was not stated."""
    expert_placement: tuple[int, ...] | None = None
    """The expert in each slot, slots numbered rank by rank; None for contiguous blocks."""

    def samples(self, scope: Scope = "job") -> Iterator[Sample]:
        """Yield every number to export, grouped by metric.

        Args:
            scope: `job` for a sink that speaks for the whole job. `node` for one of several
                endpoints whose counters are added up: each then yields its own ranks' share, and
                only the job's first endpoint the gauges and the per-expert counters.
        """
        for name, labels, values in self.columns(scope):
            yield from map(Sample, repeat(name), labels, values)

    def columns(self, scope: Scope = "job") -> Iterator[Columns]:
        """Yield what `samples` yields, metric by metric."""
        bounded = list(self._bounded_samples(scope))
        for name, samples in groupby(bounded, attrgetter("name")):
            _, labels, values = zip(*samples, strict=True)
            yield Columns(name, labels, values)
        num_experts = self._num_expert_series(scope)
        num_kept = min(num_experts, max(0, self.max_series - len(bounded) - 1))
        if num_kept:
            yield expert_columns(self.layers, num_kept)
        yield Columns("moe_telemetry_series_dropped_total", ({},), (num_experts - num_kept,))

    def _bounded_samples(self, scope: Scope) -> Iterator[Sample]:
        yield from counter_samples(self.layers, whole_job=scope == "job")
        yield from replay_counter_samples(self.layers, whole_job=scope == "job")
        if scope == "job" or self.leads:
            yield from gauge_samples(self.layers)
            yield from load_shape_samples(self.layers)
            yield from score_samples(self.layers)
            yield from histogram_samples(self.layers)
            if self.expert_parallel_ranks is not None:
                yield from rank_samples(self.layers, self.expert_parallel_ranks, self.expert_placement)
            yield from replay_gauge_samples(self.layers)
            if self.health.misalignment is not None:
                labels = {"cause": self.health.misalignment, "offset": str(self.health.misalignment_offset)}
                yield Sample("moe_replay_misalignment_info", labels, 1)
        yield Sample("moe_telemetry_step", {}, self.step)
        yield Sample("moe_telemetry_last_step_timestamp_seconds", {}, self.time)
        yield from health_samples(self.health)
        yield Sample("moe_telemetry_build_info", {"version": __version__}, 1)

    def _num_expert_series(self, scope: Scope) -> int:
        if not self.per_expert or not (scope == "job" or self.leads):
            return 0
        return sum(layer.num_experts * len(layer.total) for layer in self.layers.values())

    def rank_loads(self, stage: str = "train") -> dict[RouterKey, tuple[float, ...]]:
        """Return the load of each expert-parallel rank, by router, expected from the window's assignments.

        Replicas of an expert are taken to share its load evenly. Empty without `expert_parallel_ranks`.
        """
        if self.expert_parallel_ranks is None:
            return {}
        return rank_loads(self.layers, stage, self.expert_parallel_ranks, self.expert_placement)

    def to_json(self) -> str:
        """Serialise to one line of JSON that `from_json` reads back to an equal snapshot."""
        values = {
            "schema": SCHEMA,
            "run": self.run,
            "step": self.step,
            "time": self.time,
            "world_size": self.world_size,
            "labels": dict(self.labels),
            "leads": self.leads,
            "per_expert": self.per_expert,
            "max_series": self.max_series,
            "expert_parallel_ranks": self.expert_parallel_ranks,
            "expert_placement": self.expert_placement,
            "health": asdict(self.health),
            "layers": [{"router": str(key), **asdict(layer)} for key, layer in self.layers.items()],
        }
        return json.dumps(values, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        """Read what `to_json` wrote.

        Raises:
            SnapshotError: `text` is no snapshot, or one of another schema.
        """
        try:
            values = json.loads(text)
            schema = values.pop("schema")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise SnapshotError(f"not a snapshot: {text[:80]!r}") from error
        if schema != SCHEMA:
            raise SnapshotError(f"snapshot has schema {schema!r}; this version reads {SCHEMA}")
        try:
            layers = {RouterKey.parse(layer.pop("router")): _layer(layer) for layer in values.pop("layers")}
            if (placement := values.get("expert_placement")) is not None:
                values["expert_placement"] = tuple(placement)
            return cls(**{**values, "layers": layers, "health": Health(**values["health"])})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise SnapshotError(f"snapshot of schema {SCHEMA} is damaged: {error}") from error


def _layer(values: Mapping[str, Any]) -> LayerSnapshot:
    return LayerSnapshot(
        num_experts=values["num_experts"],
        total={stage: _counts(counts) for stage, counts in values["total"].items()},
        window={stage: _counts(counts) for stage, counts in values["window"].items()},
        share={stage: Share(**{**share, "replay": _replay(share)}) for stage, share in values["share"].items()},
        worst_rank_zero_overlap=values["worst_rank_zero_overlap"],
        relative_load={stage: tuple(buckets) for stage, buckets in values.get("relative_load", {}).items()},
    )


def _counts(values: Mapping[str, Any]) -> Counts:
    scores = values["scores"]
    return Counts(
        **{
            **values,
            "assignments": tuple(values["assignments"]),
            "replay": _replay(values),
            "scores": None if scores is None else _scores(scores),
        }
    )


def _replay(values: Mapping[str, Any]) -> ReplayTotals | None:
    return None if values["replay"] is None else ReplayTotals(**values["replay"])


def _scores(values: Mapping[str, Any]) -> ScoreStatistics:
    probabilities = values["mean_probabilities"]
    return ScoreStatistics(**{**values, "mean_probabilities": None if probabilities is None else tuple(probabilities)})

"""From counts to samples: which number each metric of the catalogue takes from which record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from moe_telemetry.catalog import Columns, Sample
from moe_telemetry.identity import RouterKey
from moe_telemetry.load import LoadStats
from moe_telemetry.records import Health, LayerSnapshot, Share

__all__ = ["counter_samples", "expert_columns", "gauge_samples", "health_samples"]

Layers = Mapping[RouterKey, LayerSnapshot]

_OF_SHARE: Mapping[str, Callable[[Share], int]] = {
    "moe_router_tokens_total": attrgetter("tokens"),
    "moe_router_padding_tokens_total": attrgetter("padding_tokens"),
    "moe_router_assignments_total": attrgetter("assignments"),
    "moe_router_dropped_assignments_total": attrgetter("dropped"),
    "moe_router_invalid_assignments_total": attrgetter("invalid"),
}

_OF_LOAD: Mapping[str, Callable[[LoadStats], float]] = {
    "moe_load_max_violation_ratio": attrgetter("max_violation"),
    "moe_load_min_violation_ratio": attrgetter("min_violation"),
    "moe_load_cv_ratio": attrgetter("cv"),
    "moe_load_entropy_ratio": attrgetter("entropy"),
    "moe_load_gini_ratio": attrgetter("gini"),
    "moe_load_dead_experts": attrgetter("dead_experts"),
}

_OF_HEALTH: Mapping[str, Callable[[Health], Any]] = {
    "moe_telemetry_routers_expected": attrgetter("routers_expected"),
    "moe_telemetry_routers_observed": attrgetter("routers_observed"),
    "moe_telemetry_run_finished": attrgetter("run_finished"),
    "moe_telemetry_overhead_seconds_total": attrgetter("overhead_seconds"),
    "moe_telemetry_skipped_reductions_total": attrgetter("skipped_reductions"),
}


def counter_samples(layers: Layers, *, whole_job: bool) -> Iterator[Sample]:
    """Yield the router counters: this endpoint's share, or the whole job's totals."""
    shares = [
        (_labels(key, stage), share)
        for key, layer in layers.items()
        for stage, share in _shares(layer, whole_job=whole_job).items()
    ]
    for name, read in _OF_SHARE.items():
        for labels, share in shares:
            yield Sample(name, labels, read(share))


def gauge_samples(layers: Layers) -> Iterator[Sample]:
    """Yield the load statistics of the window; a router that placed nothing in it has none."""
    loads = [
        (_labels(key, stage), stats)
        for key, layer in layers.items()
        for stage, counts in layer.window.items()
        if (stats := LoadStats.of(counts.assignments)) is not None
    ]
    for name, read in _OF_LOAD.items():
        for labels, stats in loads:
            yield Sample(name, labels, read(stats))


def expert_columns(layers: Layers, limit: int) -> Columns:
    """Return the assignments of every expert, for the whole job; experts beyond `limit` are left out."""
    labels: list[Mapping[str, str]] = []
    values: list[int] = []
    for key, layer in layers.items():
        for stage, counts in layer.total.items():
            labels += _expert_labels(key, stage, len(counts.assignments))
            values += counts.assignments
    return Columns("moe_expert_assignments_total", tuple(labels[:limit]), tuple(values[:limit]))


def health_samples(health: Health) -> Iterator[Sample]:
    """Yield what telemetry says about itself."""
    for name, read in _OF_HEALTH.items():
        yield Sample(name, {}, float(read(health)))
    for exporter, errors in health.export_errors.items():
        yield Sample("moe_telemetry_export_errors_total", {"exporter": exporter}, errors)


# The labels of a series are made once: a job has few routers and exports them for ever, and a sink that
# keeps something by labels compares them by address.
@lru_cache(maxsize=4096)
def _labels(key: RouterKey, stage: str) -> Mapping[str, str]:
    return MappingProxyType({"stage": stage, "block": key.block, "layer": str(key.layer)})


@lru_cache(maxsize=4096)
def _expert_labels(key: RouterKey, stage: str, num_experts: int) -> tuple[Mapping[str, str], ...]:
    labels = _labels(key, stage)
    return tuple(MappingProxyType({**labels, "expert": str(expert)}) for expert in range(num_experts))


def _shares(layer: LayerSnapshot, *, whole_job: bool) -> Mapping[str, Share]:
    if whole_job:
        return {stage: counts.as_share() for stage, counts in layer.total.items()}
    return layer.share

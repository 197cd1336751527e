"""From scores and the shape of the load to samples: the metrics of `score_metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType

from moe_telemetry.catalog import Sample
from moe_telemetry.expert_parallel import balancedness, place_experts, straggler_factor
from moe_telemetry.identity import RouterKey
from moe_telemetry.load_shape import RELATIVE_LOAD_BUCKETS, hottest_share
from moe_telemetry.records import LayerSnapshot
from moe_telemetry.score_statistics import ScoreStatistics

__all__ = ["histogram_samples", "load_shape_samples", "rank_loads", "rank_samples", "score_samples"]

Layers = Mapping[RouterKey, LayerSnapshot]

_NUMBERS_OF_HOTTEST = (1, 4, 16)

_OF_SCORES: Mapping[str, Callable[[ScoreStatistics], float | None]] = {
    "moe_score_entropy_ratio": attrgetter("entropy"),
    "moe_topk_boundary_margin_ratio": attrgetter("boundary_margin"),
    "moe_selected_mass_ratio": attrgetter("selected_mass"),
    "moe_logit_max": attrgetter("logit_max"),
    "moe_router_z": attrgetter("z"),
    "moe_balance_loss_ratio": attrgetter("balance_loss"),
    "moe_bias_overlap_ratio": attrgetter("bias_overlap"),
    "moe_expert_bias_max": attrgetter("bias_max"),
    "moe_expert_bias_min": attrgetter("bias_min"),
}


def load_shape_samples(layers: Layers) -> Iterator[Sample]:
    """Yield the load of single microbatches, and the shares of the hottest experts, of the window."""
    for key, layer in layers.items():
        for stage, counts in layer.window.items():
            if counts.microbatch_max_violation is not None:
                labels = _labels(key, stage)
                yield Sample("moe_load_microbatch_max_violation_ratio", labels, counts.microbatch_max_violation)
    for key, layer in layers.items():
        for stage, counts in layer.window.items():
            for number in _NUMBERS_OF_HOTTEST:
                share = hottest_share(counts.assignments, number) if number < layer.num_experts else None
                if share is not None:
                    yield Sample("moe_load_hottest_share_ratio", _labels(key, stage, experts=str(number)), share)


def score_samples(layers: Layers) -> Iterator[Sample]:
    """Yield the score statistics of the window, of training where there was any, and the count of bad tokens."""
    for key, layer in layers.items():
        for stage, counts in layer.total.items():
            if counts.scores is not None:
                bad = counts.scores.nan_rows + counts.scores.infinite_rows
                yield Sample("moe_score_nonfinite_tokens_total", _labels(key, stage), bad)
    found = [(_labels(key), scores) for key, layer in layers.items() if (scores := _scores(layer)) is not None]
    for name, read in _OF_SCORES.items():
        for labels, scores in found:
            if (value := read(scores)) is not None:
                yield Sample(name, labels, value)


def histogram_samples(layers: Layers) -> Iterator[Sample]:
    """Yield the relative loads of all windows so far."""
    for key, layer in layers.items():
        for stage, buckets in layer.relative_load.items():
            for labels, count in zip(_bucket_labels(key, stage), buckets, strict=True):
                yield Sample("moe_expert_relative_load_bucket", labels, count)
            # the relative loads of a window add up to E, as many as there are
            yield Sample("moe_expert_relative_load_sum", _labels(key, stage), buckets[-1])
            yield Sample("moe_expert_relative_load_count", _labels(key, stage), buckets[-1])


def rank_samples(layers: Layers, num_ranks: int, expert_of_slot: tuple[int, ...] | None) -> Iterator[Sample]:
    """Yield how evenly expert-parallel ranks are loaded in the window, by stage, over all layers."""
    stages = dict.fromkeys(stage for layer in layers.values() for stage in layer.window)
    loads = {stage: list(rank_loads(layers, stage, num_ranks, expert_of_slot).values()) for stage in stages}
    for name, read in (("moe_ep_balancedness_ratio", balancedness), ("moe_ep_straggler_ratio", straggler_factor)):
        for stage in stages:
            if (value := read(loads[stage])) is not None:
                yield Sample(name, _stage_labels(stage), value)


def rank_loads(
    layers: Layers, stage: str, num_ranks: int, expert_of_slot: tuple[int, ...] | None
) -> dict[RouterKey, tuple[float, ...]]:
    """Return the load expected on each expert-parallel rank, from the window's assignments of each layer."""
    return {
        key: place_experts(layer.num_experts, num_ranks, expert_of_slot).expected_rank_load(
            layer.window[stage].assignments
        )
        for key, layer in layers.items()
        if stage in layer.window
    }


def _scores(layer: LayerSnapshot) -> ScoreStatistics | None:
    stages = sorted(layer.window, key=lambda stage: stage != "train")
    return next((scores for stage in stages if (scores := layer.window[stage].scores) is not None), None)


@lru_cache(maxsize=8192)
def _labels(key: RouterKey, stage: str | None = None, *, experts: str | None = None) -> Mapping[str, str]:
    labels = {"block": key.block, "layer": str(key.layer)}
    if stage is not None:
        labels = {"stage": stage, **labels}
    return MappingProxyType(labels if experts is None else {**labels, "experts": experts})


@lru_cache(maxsize=4096)
def _bucket_labels(key: RouterKey, stage: str) -> tuple[Mapping[str, str], ...]:
    bounds = [repr(bound) for bound in RELATIVE_LOAD_BUCKETS[:-1]] + ["+Inf"]
    return tuple(MappingProxyType({**_labels(key, stage), "le": bound}) for bound in bounds)


@lru_cache(maxsize=64)
def _stage_labels(stage: str) -> Mapping[str, str]:
    return MappingProxyType({"stage": stage})

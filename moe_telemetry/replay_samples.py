"""From the replay check to samples: which number each `moe_replay_*` metric takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from moe_telemetry.catalog import Sample
from moe_telemetry.identity import RouterKey
from moe_telemetry.records import LayerSnapshot
from moe_telemetry.replay_totals import ReplayTotals

__all__ = ["replay_counter_samples", "replay_gauge_samples"]

Layers = Mapping[RouterKey, LayerSnapshot]

_OUTCOMES = ("checked", "placeholder", "missing", "malformed", "out_of_range", "repeated")

_OF_WINDOW: Mapping[str, Callable[[ReplayTotals], Any]] = {
    "moe_replay_agreement_ratio": attrgetter("agreement"),
    "moe_replay_tie_tolerant_agreement_ratio": attrgetter("tie_tolerant_agreement"),
    "moe_replay_corrected_agreement_ratio": attrgetter("chance_corrected_agreement"),
    "moe_replay_coverage_ratio": attrgetter("coverage"),
    "moe_replay_longest_equal_run_tokens": attrgetter("longest_equal_run"),
    "moe_replay_check_blind": attrgetter("blind"),
}


def replay_counter_samples(layers: Layers, *, whole_job: bool) -> Iterator[Sample]:
    """Yield the counters of layers that were replayed: this endpoint's share, or the whole job's totals."""
    totals = [(key, replay) for key, layer in layers.items() if (replay := _total(layer, whole_job=whole_job))]
    for key, replay in totals:
        for outcome in _OUTCOMES:
            yield Sample("moe_replay_tokens_total", _labels(key, outcome), getattr(replay, outcome))
    for key, replay in totals:
        yield Sample("moe_replay_zero_overlap_tokens_total", _labels(key), replay.zero_overlap)
    for key, replay in totals:
        yield Sample("moe_replay_shared_fraction_total", _labels(key), replay.shared)


def replay_gauge_samples(layers: Layers) -> Iterator[Sample]:
    """Yield the ratios of the window; one over nothing is absent."""
    windows = [(key, replay) for key, layer in layers.items() if (replay := layer.replay) is not None]
    for name, read in _OF_WINDOW.items():
        for key, replay in windows:
            if (value := read(replay)) is not None:
                yield Sample(name, _labels(key), float(value))
    for key, layer in layers.items():
        if layer.worst_rank_zero_overlap is not None:
            yield Sample("moe_replay_zero_overlap_ratio", _labels(key), layer.worst_rank_zero_overlap)


def _total(layer: LayerSnapshot, *, whole_job: bool) -> ReplayTotals | None:
    parts = layer.total if whole_job else layer.share
    found = [part.replay for part in parts.values() if part.replay is not None]
    return sum(found[1:], found[0]) if found else None


@lru_cache(maxsize=8192)
def _labels(key: RouterKey, outcome: str | None = None) -> Mapping[str, str]:
    labels = {"block": key.block, "layer": str(key.layer)}
    return MappingProxyType(labels if outcome is None else {**labels, "outcome": outcome})

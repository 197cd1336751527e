"""From what a LiveView keeps to the document that it shows: the contract of `/live.json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from moe_telemetry._version import __version__
from moe_telemetry.alerts import RULES
from moe_telemetry.identity import RouterKey
from moe_telemetry.load import LoadStats, hottest_experts
from moe_telemetry.records import Counts, LayerSnapshot
from moe_telemetry.snapshot import Snapshot
from moe_telemetry_exporters.live.alerts import Standing
from moe_telemetry_exporters.live.curves import MEASURES, Point

__all__ = ["LIVE_SCHEMA", "Scene", "document_of", "waiting_document"]

LIVE_SCHEMA = 1
"""Number of the document's form; a reader of another version says so."""

_DIGITS = 4
_LIMITS = MappingProxyType(
    {
        "max_violation": RULES["MoeLoadImbalanced"].limit,
        "dead": RULES["MoeExpertsDead"].limit,
        "score_entropy": RULES["MoeRouterEntropyCollapsed"].limit,
        "agreement": RULES["MoeReplayAgreementLow"].limit,
        "zero_overlap": RULES["MoeReplayZeroOverlapHigh"].limit,
    }
)
"""By measure of the curves, where its alert begins."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """All that one document is made of; nothing in it changes any more."""

    now: float
    latest: Snapshot
    age_seconds: float
    usual_gap_seconds: float | None
    state: str
    standing: tuple[Standing, ...]
    stage: str
    stages: tuple[str, ...]
    snapshot: Snapshot
    """The last one that saw the stage."""
    window_age_seconds: float
    points: tuple[Point, ...]
    layer: str | None


def waiting_document(now: float) -> dict[str, Any]:
    """Return the document of an endpoint that has nothing to show yet."""
    return {"schema": LIVE_SCHEMA, "version": __version__, "now": round(now, 3), "state": "waiting"}


def document_of(scene: Scene) -> dict[str, Any]:
    """Return the whole document; figures are rounded to what can be seen, and a ratio over nothing is null."""
    latest, health = scene.latest, scene.latest.health
    keys = tuple(scene.snapshot.layers)
    return {
        **waiting_document(scene.now),
        "state": scene.state,
        "run": latest.run,
        "labels": dict(latest.labels),
        "step": latest.step,
        "time": latest.time,
        "age_seconds": round(scene.age_seconds, 1),
        "usual_gap_seconds": _rounded(scene.usual_gap_seconds),
        "world_size": latest.world_size,
        "leads": latest.leads,
        "health": {
            "routers_expected": health.routers_expected,
            "routers_observed": health.routers_observed,
            "overhead_seconds": _rounded(health.overhead_seconds),
            "skipped_reductions": health.skipped_reductions,
            "export_errors": dict(health.export_errors),
            "misalignment": health.misalignment,
            "misalignment_offset": health.misalignment_offset,
        },
        "alerts": [_alert(standing, scene.now) for standing in scene.standing],
        "stages": list(scene.stages),
        "stage": scene.stage,
        "window": {"step": scene.snapshot.step, "age_seconds": round(scene.window_age_seconds, 1)},
        "layers": [_layer(key, layer, scene.stage) for key, layer in scene.snapshot.layers.items()],
        # in hundredths of the mean load: whole numbers are the shortest way to write a large matrix
        "load_percent": [_load_percent(layer.window.get(scene.stage)) for layer in scene.snapshot.layers.values()],
        "limits": dict(_LIMITS),
        "curves": _curves(scene.points, next((key for key in keys if str(key) == scene.layer), None)),
    }


def _alert(standing: Standing, now: float) -> dict[str, Any]:
    alert, rule = standing.alert, RULES[standing.alert.name]
    return {
        "name": alert.name,
        "severity": alert.severity,
        "layer": None if alert.layer is None else str(alert.layer),
        "exporter": alert.exporter,
        "value": _rounded(alert.value),
        "summary": alert.summary,
        "meaning": rule.meaning,
        "since": round(standing.since, 1),
        "hold_seconds": rule.hold_seconds,
        "state": "firing" if standing.is_firing(now) else "pending",
    }


def _layer(key: RouterKey, layer: LayerSnapshot, stage: str) -> dict[str, Any]:
    counts = layer.window.get(stage)
    return {
        "key": str(key),
        "block": key.block,
        "layer": key.layer,
        "experts": layer.num_experts,
        **_load(counts),
        **_scores(counts),
        **_replay(layer),
    }


def _load(counts: Counts | None) -> dict[str, Any]:
    stats = None if counts is None else LoadStats.of(counts.assignments)
    names = ("max_violation", "min_violation", "cv", "entropy", "gini", "dead_experts")
    values: dict[str, Any] = {
        f"load_{name}" if name == "entropy" else name: None if stats is None else _rounded(getattr(stats, name))
        for name in names
    }
    hottest = None if counts is None else next(iter(hottest_experts(counts.assignments, 1)), None)
    return {
        "tokens": 0 if counts is None else counts.tokens,
        "padding_tokens": 0 if counts is None else counts.padding_tokens,
        "dropped": 0 if counts is None else counts.dropped,
        "invalid": 0 if counts is None else counts.invalid,
        **values,
        "hottest_expert": None if hottest is None else hottest[0],
        "hottest_share": None if hottest is None else _rounded(hottest[1]),
    }


def _scores(counts: Counts | None) -> dict[str, Any]:
    scores = None if counts is None else counts.scores
    names = ("entropy", "boundary_margin", "selected_mass", "logit_max")
    return {
        f"score_{name}" if name == "entropy" else name: None if scores is None else _rounded(getattr(scores, name))
        for name in names
    }


def _replay(layer: LayerSnapshot) -> dict[str, Any]:
    """Return the replay check of the window, all stages together, with zero overlap of the worst rank."""
    replay = layer.replay
    names = ("agreement", "tie_tolerant_agreement", "coverage", "fallback_ratio")
    return {
        **{name: None if replay is None else _rounded(getattr(replay, name)) for name in names},
        "zero_overlap": _rounded(layer.worst_rank_zero_overlap),
        "replayed": 0 if replay is None else replay.replayed,
        "checked": 0 if replay is None else replay.checked,
        "blind": replay is not None and replay.blind,
    }


def _load_percent(counts: Counts | None) -> list[int] | None:
    total = 0 if counts is None else sum(counts.assignments)
    if counts is None or not total:
        return None
    scale = 100 * len(counts.assignments) / total
    # a load of few assignments must not look like none
    return [max(1, round(count * scale)) if count else 0 for count in counts.assignments]


def _curves(points: Sequence[Point], key: RouterKey | None) -> dict[str, Any]:
    curves: dict[str, Any] = {
        "time": [round(point.time, 1) for point in points],
        "tokens_per_second": _rates(points),
        "layer": None if key is None else str(key),
        "measures": {name: _measure(points, name, key) for name in MEASURES},
    }
    return curves


def _measure(points: Sequence[Point], name: str, key: RouterKey | None) -> dict[str, Any] | None:
    spreads = [point.spread[name] for point in points]
    if not any(spreads):
        return None
    own = None if key is None else [_rounded(point.of_layer(key, name)) for point in points]
    return {
        "worst": [None if spread is None else _rounded(spread[0]) for spread in spreads],
        "median": [None if spread is None else _rounded(spread[1]) for spread in spreads],
        "layer": own,
    }


def _rates(points: Sequence[Point]) -> list[float | None]:
    """Return tokens a second from each point to the next; none for the first, or after a step back."""
    rates: list[float | None] = [None] * min(1, len(points))
    for before, after in pairwise(points):
        tokens = after.tokens - before.tokens
        rates.append(_rounded(tokens / (after.time - before.time)) if tokens >= 0 else None)
    return rates


def _rounded(value: float | None) -> float | None:
    """Return a number with few digits: a fraction to four places, a large one to four digits."""
    if value is None or not math.isfinite(value):
        return None
    if isinstance(value, int) or abs(value) < 10:
        return round(value, _DIGITS)
    return float(f"{value:.{_DIGITS + 1}g}")

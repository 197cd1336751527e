"""The alerts of one snapshot: the conditions of the Prometheus rules, for sinks that have no Prometheus.

    for alert in standing_alerts(snapshot):
        print(alert.name, alert.layer, alert.summary)

A rule looks at ten minutes of counters, and holds its condition over a time; here the window of one snapshot
decides, and `RULES[alert.name].hold_seconds` says how long it has to stand. Names, limits, severities and times
are those of `grafana/rules`; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from moe_telemetry.identity import RouterKey
from moe_telemetry.load import LoadStats
from moe_telemetry.records import Counts, LayerSnapshot
from moe_telemetry.replay_totals import ReplayTotals
from moe_telemetry.snapshot import Snapshot

__all__ = [
    "FRESH_SECONDS",
    "MIN_REPLAYED",
    "RULES",
    "Alert",
    "Rule",
    "Severity",
    "stalled_after",
    "stalled_alert",
    "standing_alerts",
]

Severity = Literal["critical", "warning", "info"]


class Rule(NamedTuple):
    """One alert rule."""

    severity: Severity
    limit: float
    """The number in its condition."""
    hold_seconds: int
    """How long the condition has to stand before somebody is told (`for`)."""
    meaning: str
    """What it says about the run, in one sentence; the runbook has the rest."""


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "MoeReplayZeroOverlapHigh": Rule(
            "critical", 0.01, 120, "Tokens train under the routes of other tokens: stop the run or turn replay off."
        ),
        "MoeReplayCoverageLow": Rule(
            "critical", 0.01, 300, "Hardly a replayed route could be checked: the mismatch is unknown, not 0 %."
        ),
        "MoeReplayAgreementLow": Rule(
            "warning", 0.9, 300, "Rollout and trainer choose different experts: misaligned rows, or stale weights."
        ),
        "MoeExpertsDead": Rule("warning", 1, 900, "Experts without a token do not learn, and their memory is wasted."),
        "MoeLoadImbalanced": Rule(
            "warning", 2, 1800, "The hottest expert takes over three times the mean load, and all ranks wait for it."
        ),
        "MoeRouterEntropyCollapsed": Rule(
            "warning", 0.1, 900, "One expert takes nearly all of the weight, and the others learn nothing."
        ),
        "MoeTelemetryStalled": Rule(
            "warning", 900, 60, "The endpoint is up and nothing new comes: training hangs, or a rank is missing."
        ),
        "MoeTelemetryRoutersMissing": Rule(
            "warning", 1, 300, "Hooks of these routers never fire, and their layers are in no other number."
        ),
        "MoeTelemetryExporterFailing": Rule(
            "warning", 3, 60, "Training is not affected; what the exporter did not take is lost to it."
        ),
        "MoeReplayCheckBlind": Rule(
            "info", 1, 300, "K is large against E, so that random routes overlap too: go by the agreement."
        ),
    }
)
"""Every rule by its name, which is an anchor of the runbook, the most severe first."""

MIN_REPLAYED = 100
"""Replayed, or checked, tokens of a layer below which its replay is not judged."""
FRESH_SECONDS = 600
"""Age of the last export from which a rule is quiet, and only a stalled run is news."""

_CORRECTED_AGREEMENT = 0.8
_USUAL_GAPS = 5
_SILENCE_SECONDS = 3600
_ORDER = tuple(RULES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One condition that holds in one snapshot."""

    name: str
    """The name of its rule."""
    severity: Severity
    layer: RouterKey | None
    """The router concerned; None where it is the job."""
    value: float
    summary: str
    """A sentence with the number."""
    exporter: str | None = None
    """The exporter concerned; None where it is none of them."""


def standing_alerts(snapshot: Snapshot, *, recent_errors: Mapping[str, int] | None = None) -> tuple[Alert, ...]:
    """Return what is wrong in the window of a snapshot, the most severe first; nothing after the run's end.

    Args:
        snapshot: the latest one.
        recent_errors: failures by exporter within half an hour, where they are known; else those since the start.
    """
    if snapshot.health.run_finished:
        return ()
    found = [alert for key, layer in snapshot.layers.items() for alert in _of_layer(key, layer)]
    found += _of_telemetry(snapshot, snapshot.health.export_errors if recent_errors is None else recent_errors)
    return tuple(sorted(found, key=lambda alert: _ORDER.index(alert.name)))


def stalled_after(usual_gap_seconds: float | None) -> float:
    """Return the age of the last export, in seconds, from which an unfinished run is stalled.

    Args:
        usual_gap_seconds: mean gap between two exports; None where there was only one.
    """
    least = _SILENCE_SECONDS if usual_gap_seconds is None else _USUAL_GAPS * usual_gap_seconds
    return max(RULES["MoeTelemetryStalled"].limit, least)


def stalled_alert(age_seconds: float, usual_gap_seconds: float | None) -> Alert | None:
    """Return the alert of an unfinished run whose last export is that old, None where it may just be slow."""
    if age_seconds <= stalled_after(usual_gap_seconds):
        return None
    return _alert("MoeTelemetryStalled", None, age_seconds, f"no export for {age_seconds / 60:.0f} minutes")


def _of_layer(key: RouterKey, layer: LayerSnapshot) -> Iterator[Alert]:
    if (replay := layer.replay) is not None:
        yield from _of_replay(key, replay)
    if (counts := layer.window.get("train")) is not None:
        yield from _of_load(key, counts)
    entropy = _score_entropy(layer)
    if entropy is not None and entropy < RULES["MoeRouterEntropyCollapsed"].limit:
        text = f"the router of {key} has collapsed (entropy {entropy:.1%} of log E)"
        yield _alert("MoeRouterEntropyCollapsed", key, entropy, text)


def _score_entropy(layer: LayerSnapshot) -> float | None:
    """Return the entropy of the scores in training, or where that had none, of another stage."""
    stages = sorted(layer.window, key=lambda stage: stage != "train")
    scores = (layer.window[stage].scores for stage in stages)
    return next((found.entropy for found in scores if found is not None), None)


def _of_replay(key: RouterKey, replay: ReplayTotals) -> Iterator[Alert]:
    if replay.replayed >= MIN_REPLAYED and (coverage := replay.coverage or 0.0) < RULES["MoeReplayCoverageLow"].limit:
        text = f"routes are replayed in {key}, and {coverage:.1%} of them could be checked"
        yield _alert("MoeReplayCoverageLow", key, coverage, text)
    if replay.blind:
        yield _alert("MoeReplayCheckBlind", key, 1, f"zero overlap shows nothing in {key}")
    if replay.checked < MIN_REPLAYED:
        return
    zero_overlap = replay.zero_overlap_ratio or 0.0
    if zero_overlap > RULES["MoeReplayZeroOverlapHigh"].limit:
        text = f"{zero_overlap:.1%} of the replayed tokens of {key} share no expert with the router's own choice"
        yield _alert("MoeReplayZeroOverlapHigh", key, zero_overlap, text)
    agreement, corrected = replay.agreement or 0.0, replay.chance_corrected_agreement
    is_low_by_chance = replay.blind and corrected is not None and corrected < _CORRECTED_AGREEMENT
    if agreement < RULES["MoeReplayAgreementLow"].limit or is_low_by_chance:
        text = f"replayed routes of {key} agree only to {agreement:.1%} with the router's own choice"
        yield _alert("MoeReplayAgreementLow", key, agreement, text)


def _of_load(key: RouterKey, counts: Counts) -> Iterator[Alert]:
    stats = LoadStats.of(counts.assignments)
    if stats is None:
        return
    if (dead := stats.dead_experts) >= RULES["MoeExpertsDead"].limit:
        text = f"{dead} experts of {key} receive no token" if dead > 1 else f"1 expert of {key} receives no token"
        yield _alert("MoeExpertsDead", key, dead, text)
    if stats.max_violation > RULES["MoeLoadImbalanced"].limit:
        text = f"MaxVio of {key} is {stats.max_violation:.2f}"
        yield _alert("MoeLoadImbalanced", key, stats.max_violation, text)


def _of_telemetry(snapshot: Snapshot, errors_by_exporter: Mapping[str, int]) -> Iterator[Alert]:
    missing = snapshot.health.routers_expected - snapshot.health.routers_observed
    if missing >= RULES["MoeTelemetryRoutersMissing"].limit:
        text = f"{missing} routers have not counted a token" if missing > 1 else "1 router has not counted a token"
        yield _alert("MoeTelemetryRoutersMissing", None, missing, text)
    for exporter, errors in errors_by_exporter.items():
        if errors >= RULES["MoeTelemetryExporterFailing"].limit:
            text = f"the exporter {exporter} fails ({errors} times)"
            yield _alert("MoeTelemetryExporterFailing", None, errors, text, exporter)


def _alert(name: str, layer: RouterKey | None, value: float, summary: str, exporter: str | None = None) -> Alert:
    severity = RULES[name].severity
    return Alert(name=name, severity=severity, layer=layer, value=float(value), summary=summary, exporter=exporter)

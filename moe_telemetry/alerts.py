"""The alerts of one snapshot: the conditions of the Prometheus rules, for sinks that have no Prometheus.

    for alert in standing_alerts(snapshot):
        print(alert.name, alert.layer, alert.summary)

A rule holds its condition over a time and over counters; here the window of one snapshot decides. Names and
limits are those of `grafana/rules`; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moe_telemetry.identity import RouterKey
from moe_telemetry.load import LoadStats
from moe_telemetry.records import Counts, LayerSnapshot
from moe_telemetry.replay_totals import ReplayTotals
from moe_telemetry.snapshot import Snapshot

__all__ = ["LIMITS", "MIN_REPLAYED", "Alert", "Severity", "standing_alerts"]

Severity = Literal["critical", "warning", "info"]

LIMITS = MappingProxyType(
    {
        "MoeReplayZeroOverlapHigh": 0.01,
        "MoeReplayAgreementLow": 0.9,
        "MoeReplayCoverageLow": 0.01,
        "MoeReplayCheckBlind": 1,
        "MoeExpertsDead": 1,
        "MoeLoadImbalanced": 2,
        "MoeRouterEntropyCollapsed": 0.1,
        "MoeTelemetryRoutersMissing": 1,
        "MoeTelemetryExporterFailing": 3,
    }
)
"""The number in each rule's condition."""

_CORRECTED_AGREEMENT = 0.8
MIN_REPLAYED = 100
"""Replayed, or checked, tokens of a layer below which its replay is not judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One condition that holds in one snapshot."""

    name: str
    """The name of the rule, which is an anchor of the runbook."""
    severity: Severity
    layer: RouterKey | None
    """The router concerned; None where it is the job."""
    value: float
    summary: str
    """A sentence with the number."""


def standing_alerts(snapshot: Snapshot) -> tuple[Alert, ...]:
    """Return what is wrong in the window of a snapshot, the most severe first; nothing after the run's end."""
    if snapshot.health.run_finished:
        return ()
    found = [alert for key, layer in snapshot.layers.items() for alert in _of_layer(key, layer)]
    found += _of_telemetry(snapshot)
    order = ("critical", "warning", "info")
    return tuple(sorted(found, key=lambda alert: order.index(alert.severity)))


def _of_layer(key: RouterKey, layer: LayerSnapshot) -> Iterator[Alert]:
    if (replay := layer.replay) is not None:
        yield from _of_replay(key, replay, layer.worst_rank_zero_overlap)
    if (counts := layer.window.get("train")) is not None:
        yield from _of_load(key, counts)
        if counts.scores is not None and (entropy := counts.scores.entropy) is not None:
            if entropy < LIMITS["MoeRouterEntropyCollapsed"]:
                text = f"the router of {key} has collapsed (entropy {entropy:.1%} of log E)"
                yield _alert("MoeRouterEntropyCollapsed", "warning", key, entropy, text)


def _of_replay(key: RouterKey, replay: ReplayTotals, worst_rank: float | None) -> Iterator[Alert]:
    if replay.replayed >= MIN_REPLAYED and (coverage := replay.coverage or 0.0) < LIMITS["MoeReplayCoverageLow"]:
        text = f"routes are replayed in {key}, and {coverage:.1%} of them could be checked"
        yield _alert("MoeReplayCoverageLow", "critical", key, coverage, text)
    if replay.blind:
        yield _alert("MoeReplayCheckBlind", "info", key, 1, f"zero overlap shows nothing in {key}")
    if replay.checked < MIN_REPLAYED:
        return
    zero_overlap = max(worst_rank or 0.0, replay.zero_overlap_ratio or 0.0)
    if zero_overlap > LIMITS["MoeReplayZeroOverlapHigh"]:
        text = f"{zero_overlap:.1%} of the replayed tokens of {key} share no expert with the router's own choice"
        yield _alert("MoeReplayZeroOverlapHigh", "critical", key, zero_overlap, text)
    agreement, corrected = replay.agreement or 0.0, replay.chance_corrected_agreement
    is_low_by_chance = replay.blind and corrected is not None and corrected < _CORRECTED_AGREEMENT
    if agreement < LIMITS["MoeReplayAgreementLow"] or is_low_by_chance:
        text = f"replayed routes of {key} agree only to {agreement:.1%} with the router's own choice"
        yield _alert("MoeReplayAgreementLow", "warning", key, agreement, text)


def _of_load(key: RouterKey, counts: Counts) -> Iterator[Alert]:
    stats = LoadStats.of(counts.assignments)
    if stats is None:
        return
    if stats.dead_experts >= LIMITS["MoeExpertsDead"]:
        text = f"{stats.dead_experts} experts of {key} receive no token"
        yield _alert("MoeExpertsDead", "warning", key, stats.dead_experts, text)
    if stats.max_violation > LIMITS["MoeLoadImbalanced"]:
        text = f"MaxVio of {key} is {stats.max_violation:.2f}"
        yield _alert("MoeLoadImbalanced", "warning", key, stats.max_violation, text)


def _of_telemetry(snapshot: Snapshot) -> Iterator[Alert]:
    health = snapshot.health
    missing = health.routers_expected - health.routers_observed
    if missing >= LIMITS["MoeTelemetryRoutersMissing"]:
        text = f"{missing} routers have not counted a token"
        yield _alert("MoeTelemetryRoutersMissing", "warning", None, missing, text)
    for exporter, errors in health.export_errors.items():
        if errors >= LIMITS["MoeTelemetryExporterFailing"]:
            text = f"the exporter {exporter} fails ({errors} times)"
            yield _alert("MoeTelemetryExporterFailing", "warning", None, errors, text)


def _alert(name: str, severity: Severity, layer: RouterKey | None, value: float, summary: str) -> Alert:
    return Alert(name=name, severity=severity, layer=layer, value=float(value), summary=summary)

"""The alerts of one snapshot are those of the Prometheus rules: names, severities, times and limits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_telemetry import Counts, Health, LayerSnapshot, RouterKey, Snapshot
from moe_telemetry.alerts import FRESH_SECONDS, MIN_REPLAYED, RULES, Alert, stalled_alert, standing_alerts
from moe_telemetry.replay_totals import ReplayTotals
from moe_telemetry.testing import make_snapshot

FOLDER = Path(__file__).resolve().parent.parent / "grafana"
PROMETHEUS_RULES: Mapping[str, Mapping[str, Any]] = {
    rule["alert"]: rule
    for path in sorted((FOLDER / "rules").glob("*.yaml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "==": operator.eq,
}
LAYER = RouterKey("decoder", 1)


def _of_counts(counts: Counts, stage: str = "train", health: Health | None = None) -> Snapshot:
    layer = LayerSnapshot(num_experts=len(counts.assignments), total={}, window={stage: counts}, share={})
    health = health or Health(routers_expected=1, routers_observed=1)
    return replace(make_snapshot(num_layers=0), layers={LAYER: layer}, health=health)


def _of_loads(*assignments: int) -> Snapshot:
    return _of_counts(Counts(tokens=sum(assignments), assignments=assignments))


def _replay(
    *, checked: int, zero_overlap: int = 0, agreement: float = 1.0, replayed: int | None = None, top_k: int = 2
) -> Snapshot:
    replay = ReplayTotals(
        num_experts=16,
        top_k=top_k,
        replayed=checked if replayed is None else replayed,
        checked=checked,
        zero_overlap=zero_overlap,
        shared_experts=round(checked * top_k * agreement),
    )
    return _of_counts(Counts(tokens=1, assignments=(1,) * 16, replay=replay))


def _entropy(value: float, stage: str = "train") -> Snapshot:
    (layer,) = make_snapshot(num_layers=1, stages=(stage,)).layers.values()
    counts = layer.window[stage]
    assert counts.scores is not None
    even = replace(counts, assignments=(1,) * 8, scores=replace(counts.scores, entropy=value))
    return _of_counts(even, stage)


def _health(**values: Any) -> Snapshot:
    return _of_counts(Counts(tokens=4, assignments=(1,) * 4), health=replace(make_snapshot().health, **values))


# a snapshot whose number in the rule's condition is the given one
SNAPSHOTS: Mapping[str, Callable[[float], Snapshot]] = {
    "MoeReplayZeroOverlapHigh": lambda ratio: _replay(checked=10_000, zero_overlap=round(ratio * 10_000)),
    "MoeReplayAgreementLow": lambda ratio: _replay(checked=10_000, agreement=ratio),
    "MoeReplayCoverageLow": lambda ratio: _replay(replayed=10_000, checked=round(ratio * 10_000)),
    # 8 of 16 experts: one random row in ten thousand shares none
    "MoeReplayCheckBlind": lambda blind: _replay(checked=10_000, top_k=8 if blind == 1 else 2),
    "MoeExpertsDead": lambda dead: _of_loads(*[2] * (8 - round(dead)), *[0] * round(dead)),
    # the hottest of 100 experts against a mean of 100
    "MoeLoadImbalanced": lambda ratio: _of_loads(
        round(100 + 100 * ratio), *_spread(10_000 - round(100 + 100 * ratio), 99)
    ),
    "MoeRouterEntropyCollapsed": _entropy,
    "MoeTelemetryRoutersMissing": lambda missing: _health(routers_expected=3 + missing, routers_observed=3),
    "MoeTelemetryExporterFailing": lambda errors: _health(export_errors={"wandb": round(errors)}),
}
SMALLEST_CHANGE = {
    "MoeReplayCheckBlind": 1,
    "MoeExpertsDead": 1,
    "MoeTelemetryRoutersMissing": 1,
    "MoeTelemetryExporterFailing": 1,
    "MoeLoadImbalanced": 0.01,
}


def _spread(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _names(alerts: tuple[Alert, ...]) -> set[str]:
    return {alert.name for alert in alerts}


def _seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def test_there_is_a_rule_for_every_alert_and_the_other_way_round() -> None:
    assert set(RULES) == set(PROMETHEUS_RULES)
    assert set(SNAPSHOTS) | {"MoeTelemetryStalled"} == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_severity_and_time_are_those_of_the_rule(name: str) -> None:
    rule = PROMETHEUS_RULES[name]
    assert RULES[name].severity == rule["labels"]["severity"]
    assert RULES[name].hold_seconds == _seconds(rule["for"])


@pytest.mark.parametrize("name", RULES)
def test_every_rule_says_what_it_means_and_is_in_the_runbook(name: str) -> None:
    assert 40 < len(RULES[name].meaning) < 110
    assert f"\n## {name}\n" in (FOLDER / "runbook.md").read_text()


@pytest.mark.parametrize("name", SNAPSHOTS)
@pytest.mark.parametrize("changes", [-1, 0, 1])
def test_an_alert_stands_exactly_where_the_condition_of_its_rule_holds(name: str, changes: int) -> None:
    limit = RULES[name].limit
    comparison = re.search(rf"(>=|>|<|==) {limit:g}(?![\d.])", PROMETHEUS_RULES[name]["expr"])
    assert comparison is not None, f"the rule compares with another number than {limit:g}"
    value = limit + changes * SMALLEST_CHANGE.get(name, 0.001)
    stands = name in _names(standing_alerts(SNAPSHOTS[name](value)))
    assert stands == OPERATORS[comparison[1]](round(value, 6), limit)


@pytest.mark.parametrize("name", ["MoeReplayZeroOverlapHigh", "MoeReplayAgreementLow", "MoeReplayCoverageLow"])
def test_a_replay_of_few_tokens_is_not_judged(name: str) -> None:
    assert f">= {MIN_REPLAYED}" in PROMETHEUS_RULES[name]["expr"]
    few = {"replayed": MIN_REPLAYED - 1, "checked": 0}
    if name != "MoeReplayCoverageLow":
        few = {"checked": MIN_REPLAYED - 1, "zero_overlap": 50}
    assert name not in _names(standing_alerts(_replay(**few, agreement=0.0)))
    assert name in _names(standing_alerts(_replay(**{key: 4 * number for key, number in few.items()}, agreement=0.0)))


def test_where_the_check_is_blind_the_agreement_is_judged_after_correction_for_chance() -> None:
    # K/E is one half: 0.91 is 0.82 after correction, 0.89 is 0.78; without blindness 0.91 is enough
    assert "MoeReplayAgreementLow" not in _names(standing_alerts(_replay(checked=1000, top_k=8, agreement=0.91)))
    low = standing_alerts(_replay(checked=1000, top_k=8, agreement=0.895))
    assert {"MoeReplayAgreementLow", "MoeReplayCheckBlind"} == _names(low)


def test_one_rank_with_few_checked_rows_is_no_alert_of_the_layer() -> None:
    snapshot = _replay(checked=10_000, zero_overlap=5)
    (layer,) = snapshot.layers.values()
    snapshot = replace(snapshot, layers={LAYER: replace(layer, worst_rank_zero_overlap=0.5)})
    assert standing_alerts(snapshot) == ()


def test_the_entropy_of_another_stage_counts_where_nothing_is_trained() -> None:
    assert _names(standing_alerts(_entropy(0.05, stage="eval"))) == {"MoeRouterEntropyCollapsed"}


def test_loads_of_evaluation_are_no_alert() -> None:
    assert standing_alerts(_of_counts(Counts(tokens=8, assignments=(8,) + (0,) * 7), stage="eval")) == ()


def test_the_most_severe_alert_comes_first_and_each_names_its_layer() -> None:
    alerts = standing_alerts(_replay(checked=1000, zero_overlap=100, agreement=0.5, top_k=8))
    assert [alert.severity for alert in alerts] == ["critical", "warning", "info"]
    assert {alert.layer for alert in alerts} == {LAYER}
    assert alerts[0].summary == (
        "10.0% of the replayed tokens of decoder.1 share no expert with the router's own choice"
    )


def test_a_finished_run_and_a_healthy_one_have_no_alert() -> None:
    assert standing_alerts(_replay(checked=10_000, zero_overlap=20, agreement=0.99)) == ()
    assert standing_alerts(_health(routers_expected=9, run_finished=True)) == ()


def test_an_empty_window_and_a_model_without_layers_have_no_alert() -> None:
    assert standing_alerts(make_snapshot(window_steps=0)) == ()
    assert standing_alerts(make_snapshot(num_layers=0)) == ()


def test_errors_of_long_ago_are_no_alert_where_that_is_known() -> None:
    snapshot = _health(export_errors={"wandb": 7, "otel": 4})
    assert standing_alerts(snapshot, recent_errors={"wandb": 2}) == ()
    (alert,) = standing_alerts(snapshot, recent_errors={"wandb": 3})
    assert (alert.exporter, alert.summary) == ("wandb", "the exporter wandb fails (3 times)")


@pytest.mark.parametrize(
    ("age", "gap", "stands"),
    [(900, 1, False), (901, 1, True), (901, 200, False), (1001, 200, True), (3600, None, False), (3601, None, True)],
)
def test_a_run_is_stalled_after_15_minutes_five_usual_gaps_or_an_hour(
    age: float, gap: float | None, *, stands: bool
) -> None:
    alert = stalled_alert(age, gap)
    assert (alert is not None) == stands
    expr = PROMETHEUS_RULES["MoeTelemetryStalled"]["expr"]
    assert all(number in expr for number in ("> 900", "> 5\n", "> 3600"))


def test_rules_are_quiet_about_a_run_whose_last_export_is_old() -> None:
    quiet = [name for name, rule in PROMETHEUS_RULES.items() if f"< {FRESH_SECONDS}\n" in rule["expr"]]
    assert set(quiet) == set(RULES) - {"MoeTelemetryStalled"}

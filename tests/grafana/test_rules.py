"""The alert rules: what promtool says of them, and that they, the table of metrics and the runbook fit together."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_telemetry.catalog import METRICS

FOLDER = Path(__file__).resolve().parent.parent.parent / "grafana"
RULE_FILES = sorted((FOLDER / "rules").glob("*.yaml"))
TEST_FILES = sorted((FOLDER / "tests").glob("*.yaml"))
RUNBOOK = (FOLDER / "runbook.md").read_text()
NAMES = {
    "MoeExpertsDead",
    "MoeLoadImbalanced",
    "MoeReplayAgreementLow",
    "MoeReplayCheckBlind",
    "MoeReplayCoverageLow",
    "MoeReplayZeroOverlapHigh",
    "MoeRouterEntropyCollapsed",
    "MoeTelemetryExporterFailing",
    "MoeTelemetryRoutersMissing",
    "MoeTelemetryStalled",
}
# labels that Prometheus or the configuration gives to every series
CONSTANT_LABELS = {"run", "instance"}


@dataclass(frozen=True)
class Alert:
    name: str
    expr: str
    hold: str
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def text(self) -> str:
        return "\n".join([self.expr, *self.annotations.values()])


def _alerts() -> list[Alert]:
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    return [
        Alert(rule["alert"], rule["expr"], rule["for"], rule["labels"], rule["annotations"])
        for group in groups
        for rule in group["rules"]
        if "alert" in rule
    ]


ALERTS = _alerts()
every_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)


def _metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\bmoe_[a-z0-9_]+\b", text)) - {"moe_telemetry"}


def _promtool(*arguments: object) -> str:
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


# what promtool says


@pytest.mark.stack
@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.name)
def test_promtool_finds_nothing_to_complain_of(path: Path) -> None:
    assert _promtool("check", "rules", "--lint=all", "--lint-fatal", path) == ""


@pytest.mark.stack
@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.name)
def test_alerts_fire_when_they_should_and_never_otherwise(path: Path) -> None:
    assert _promtool("test", "rules", path) == ""


@pytest.mark.stack
@pytest.mark.parametrize(
    ("file", "number", "other"),
    [
        ("moe-replay", "> 0.01", ">= 0.01"),
        ("moe-replay", "< 0.9\n", "< 0.89\n"),
        ("moe-load", "for: 15m", "for: 14m"),
        ("moe-telemetry", "> 900", "> 1000"),
        ("moe-recording", "sum by (job, run) (max by", "sum by (job, run) (sum by"),
        ("moe-replay-seconds", "<= 0.005", "<= -1"),
        ("moe-replay-seconds", "<= 0.005", "<= 0.02"),
    ],
)
def test_promtool_notices_a_number_that_has_moved(tmp_path: Path, file: str, number: str, other: str) -> None:
    path = FOLDER / "rules" / f"{file.removesuffix('-seconds')}.yaml"
    rules = path.read_text()
    assert number in rules
    for folder, name, text in [
        ("rules", path.name, rules.replace(number, other)),
        ("tests", f"{file}.test.yaml", (FOLDER / "tests" / f"{file}.test.yaml").read_text()),
    ]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    assert "FAILED" in _promtool("test", "rules", tmp_path / "tests" / f"{file}.test.yaml")


# that things fit together


def test_the_alerts_are_these() -> None:
    assert sorted(alert.name for alert in ALERTS) == sorted(NAMES)


def test_every_rule_file_has_a_file_of_tests() -> None:
    tested = {path.name.replace(".test", "").replace("-seconds", "") for path in TEST_FILES}
    assert tested == {path.name for path in RULE_FILES}


@every_alert
def test_every_alert_is_tested_quiet_and_firing(alert: Alert) -> None:
    cases: list[dict[str, Any]] = [
        case
        for path in TEST_FILES
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test.get("alert_rule_test", ())
        if case["alertname"] == alert.name
    ]
    assert {bool(case["exp_alerts"]) for case in cases} == {False, True}


@every_alert
def test_every_metric_of_an_alert_is_in_the_table(alert: Alert) -> None:
    assert _metrics_in(alert.expr)
    assert _metrics_in(alert.text) - METRICS.keys() == set()


@every_alert
def test_every_label_of_an_alert_is_a_label_of_its_metrics(alert: Alert) -> None:
    known = CONSTANT_LABELS.union(*(METRICS[name].labels for name in _metrics_in(alert.text)))
    grouped = {label for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", alert.expr) for label in group.split(", ")}
    matched = set(re.findall(r"\b(\w+)=~?[\"%]", alert.text))
    shown = set(re.findall(r"\$labels\.(\w+)", alert.text))
    assert (grouped | matched | shown) - known == set()


@every_alert
def test_every_alert_is_a_sentence_with_a_number_a_for_and_a_severity(alert: Alert) -> None:
    assert re.fullmatch(r"[1-9]\d*m", alert.hold)
    assert alert.labels["severity"] in {"critical", "warning", "info"}
    assert set(alert.annotations) == {"summary", "description", "runbook_url"}
    assert re.search(r"\d", alert.annotations["description"])


@every_alert
def test_every_alert_names_its_run_and_the_router_where_it_has_one(alert: Alert) -> None:
    labels = {"run", "block", "layer"} if "by (run, block, layer)" in alert.expr else {"run"}
    for annotation in ("summary", "description"):
        shown = set(re.findall(r"\$labels\.(\w+)", alert.annotations[annotation]))
        assert labels - shown == set()


@every_alert
def test_every_alert_is_silent_once_the_run_is_finished(alert: Alert) -> None:
    assert alert.expr.endswith("unless on (run) min by (run) (moe_telemetry_run_finished) == 1\n")


@every_alert
def test_every_alert_leads_to_its_section_of_the_runbook(alert: Alert) -> None:
    assert alert.annotations["runbook_url"] == f"runbook.md#{alert.name.lower()}"
    assert f"\n## {alert.name}\n" in RUNBOOK


@every_alert
def test_every_section_of_the_runbook_has_meaning_causes_and_three_checks(alert: Alert) -> None:
    section = RUNBOOK.split(f"\n## {alert.name}\n")[1].split("\n## ")[0]
    assert section.lstrip().startswith("**")
    assert "Likely cause" in section
    assert re.findall(r"^(\d)\. ", section, re.MULTILINE) == ["1", "2", "3"]


def test_the_runbook_speaks_of_alerts_and_metrics_that_exist() -> None:
    assert set(re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE)) == NAMES
    assert set(re.findall(r"\bMoe[A-Z]\w+", RUNBOOK)) == NAMES
    assert _metrics_in(RUNBOOK) - METRICS.keys() == set()


QUERIES = [
    query for query in re.findall(r"`([^`]+)`", RUNBOOK) if re.match(r"(\w+ by|rate|increase|max|sum)\b.*\(moe_", query)
]


@pytest.mark.stack
def test_the_queries_of_the_runbook_are_promql(tmp_path: Path) -> None:
    assert len(QUERIES) >= 6
    rules = [{"record": f"runbook:query:{number}", "expr": query} for number, query in enumerate(QUERIES)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "runbook", "rules": rules}]}))
    assert _promtool("check", "rules", path) == ""


@pytest.mark.parametrize(
    "text", [RUNBOOK, *(path.read_text() for path in RULE_FILES)], ids=["runbook", *(path.name for path in RULE_FILES)]
)
def test_layers_of_one_number_in_two_blocks_are_never_one(text: str) -> None:
    assert [
        labels for labels in re.findall(r"by \(([^)]*)\)", text) if "layer" in labels and "block" not in labels
    ] == []

"""The dashboards: made of their code, about metrics that exist, with what an alert and the runbook say of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import yaml

from moe_telemetry.alerts import RULES
from moe_telemetry.catalog import METRICS
from tests.grafana.dashboard_files import DASHBOARDS, FOLDER, PANELS, TARGETS, Target, panels, variables

NAMES = {"moe-expert-parallel", "moe-layer", "moe-overview", "moe-replay", "moe-telemetry-health"}
RUNBOOK = (FOLDER / "runbook.md").read_text("utf-8")
RECORDED = {
    rule["record"]
    for group in yaml.safe_load((FOLDER / "rules" / "moe-recording.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
}
# filled in by Grafana itself
OWN_VARIABLES = {"__rate_interval"}


def _id(value: Any) -> str:
    return value if isinstance(value, str) else str(value["title"])


BAD_BELOW = {"MoeReplayAgreementLow", "MoeReplayCoverageLow", "MoeRouterEntropyCollapsed"}

every_dashboard = pytest.mark.parametrize("name", sorted(DASHBOARDS))
every_panel = pytest.mark.parametrize(("name", "panel"), PANELS, ids=_id)
every_target = pytest.mark.parametrize("target", TARGETS, ids=str)


def _metrics_in(expr: str) -> set[str]:
    """Return the names before braces, those of histograms without the ending."""
    return {re.sub(r"_bucket$", "", name) for name in re.findall(r"\b((?:job_run:)?moe_[\w:]+)\{", expr)}


def _alerts_of(panel: dict[str, Any]) -> list[str]:
    anchors = {name.lower(): name for name in RULES}
    links = [link["url"].partition("#")[2] for link in panel["links"]]
    return [anchors[anchor] for anchor in links if anchor in anchors]


# what is committed


def test_the_dashboards_are_these() -> None:
    assert set(DASHBOARDS) == NAMES
    assert {dashboard["uid"] for dashboard in DASHBOARDS.values()} == NAMES


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the builders of dashboards need Python 3.11")
def test_the_generated_files_are_up_to_date() -> None:
    command = [sys.executable, "-m", "scripts.generate_grafana", "--check"]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@every_dashboard
def test_panels_have_ids_of_their_own_and_do_not_overlap(name: str) -> None:
    dashboard = DASHBOARDS[name]
    every = [*panels(dashboard), *(panel for panel in dashboard["panels"] if panel["type"] == "row")]
    assert len({panel["id"] for panel in every}) == len(every)
    cells = Counter(
        (place["x"] + column, place["y"] + row)
        for place in (panel["gridPos"] for panel in every)
        for column in range(place["w"])
        for row in range(place["h"])
    )
    assert max(cells.values()) == 1
    assert max(column for column, _ in cells) < 24


@every_dashboard
def test_no_two_panels_of_a_dashboard_have_one_title(name: str) -> None:
    titles = [panel["title"] for panel in panels(DASHBOARDS[name])]
    assert len(titles) == len(set(titles))


# metrics


@every_target
def test_every_metric_of_a_query_is_in_the_table_or_recorded(target: Target) -> None:
    assert _metrics_in(target.expr)
    assert _metrics_in(target.expr) - METRICS.keys() - RECORDED == set()


def test_every_metric_is_on_a_dashboard() -> None:
    assert METRICS.keys() - set().union(*(_metrics_in(target.expr) for target in TARGETS)) == set()


def test_every_recorded_series_is_on_a_dashboard() -> None:
    assert RECORDED - set().union(*(_metrics_in(target.expr) for target in TARGETS)) == set()


@every_target
def test_counters_are_added_up_over_endpoints_and_gauges_are_not(target: Target) -> None:
    for name in _metrics_in(target.expr) & METRICS.keys():
        before = re.findall(r"([\w ,()]*)\((?:label_replace\(+)*(?:rate\(|increase\()?" + name, target.expr)
        words = [re.findall(r"\b(sum|max|min|count|avg)\b", text) for text in before]
        operations = {found[-1] for found in words}  # the one that is next to the series
        if METRICS[name].source == "node":
            assert operations == {"sum"}, name
        elif METRICS[name].kind == "gauge":
            assert operations <= {"max", "min", "count"}, name


@every_target
def test_the_labels_of_a_legend_are_labels_of_the_result(target: Target) -> None:
    kept = {label for group in re.findall(r"\bby \(([^)]*)\)", target.expr) for label in group.split(", ")}
    recorded = {"run"} if "job_run:" in target.expr else set()
    assert target.legend_labels - kept - recorded == set()


# what a panel says


@every_panel
def test_every_panel_leads_to_a_section_of_the_runbook(name: str, panel: dict[str, Any]) -> None:
    (link,) = panel["links"]
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", RUNBOOK, re.MULTILINE)}
    address, _, anchor = link["url"].partition("#")
    assert address == "${runbook:raw}"
    assert anchor in anchors


@every_panel
def test_the_colours_of_a_panel_change_at_the_limit_of_its_alert(name: str, panel: dict[str, Any]) -> None:
    if panel["type"] == "alertlist":
        return
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    limits = [step["value"] for step in steps if step["value"] is not None]
    assert limits == [RULES[alert].limit for alert in _alerts_of(panel)]


@every_panel
def test_the_side_of_the_limit_that_is_red_is_the_one_that_fires(name: str, panel: dict[str, Any]) -> None:
    for alert in _alerts_of(panel):
        colours = [step["color"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert colours == (["red", "green"] if alert in BAD_BELOW else ["green", "red"])


@every_panel
def test_a_legend_begins_with_the_worst_and_its_axis_shows_the_limit(name: str, panel: dict[str, Any]) -> None:
    if panel["type"] != "timeseries":
        return
    for alert in set(_alerts_of(panel)) - {"MoeTelemetryStalled"}:
        assert panel["options"]["legend"]["sortDesc"] is (alert not in BAD_BELOW)
        axis = panel["fieldConfig"]["defaults"]["custom"]
        assert axis["axisSoftMin"] < RULES[alert].limit < axis["axisSoftMax"]


def test_every_alert_has_a_panel() -> None:
    assert {alert for _, panel in PANELS for alert in _alerts_of(panel)} == RULES.keys()


@every_panel
def test_every_panel_explains_a_metric_in_the_words_of_the_table(name: str, panel: dict[str, Any]) -> None:
    if panel["type"] != "alertlist":
        (about,) = [metric for metric in METRICS.values() if metric.help in panel["description"]]
        assert about.healthy in panel["description"]


# variables


@every_dashboard
def test_every_variable_is_used_and_every_one_used_exists(name: str) -> None:
    known = variables(DASHBOARDS[name])
    exprs = " ".join(target.expr for target in TARGETS if target.dashboard == name)
    used = set(re.findall(r"\$([a-z_]+)", exprs)) - OWN_VARIABLES
    assert used == known.keys() - {"datasource", "runbook"}


@every_dashboard
def test_layers_are_sorted_as_numbers_and_the_latest_run_comes_first(name: str) -> None:
    known = variables(DASHBOARDS[name])
    assert known["run"]["sort"] == 2
    if "layer" in known:
        assert known["layer"]["sort"] == 3


@every_dashboard
def test_a_dashboard_starts_with_one_run_in_training_and_all_layers(name: str) -> None:
    known = variables(DASHBOARDS[name])
    assert not known["run"]["multi"]
    for variable in (known[each] for each in ("job", "instance", "block", "layer") if each in known):
        assert (variable["multi"], variable["includeAll"], variable["current"]["value"]) == (True, True, "$__all")
    if "stage" in known:
        assert known["stage"]["current"]["value"] == "train"


@every_dashboard
def test_the_runbook_has_one_address_in_a_hidden_variable(name: str) -> None:
    runbook = variables(DASHBOARDS[name])["runbook"]
    assert (runbook["type"], runbook["query"], runbook["hide"]) == ("constant", "runbook.md", 2)


def test_a_row_of_the_overview_leads_to_its_layer() -> None:
    (link,) = re.findall(r"/d/([\w-]+)\?\S*var-layer", str(DASHBOARDS["moe-overview"]))
    assert link in NAMES
    assert "layer" in variables(DASHBOARDS[link])

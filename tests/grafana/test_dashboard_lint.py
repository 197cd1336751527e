"""The rules of Grafana's dashboard-linter, which cannot be had here, as tests; exceptions are in its own file."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.grafana.dashboard_files import DASHBOARDS, FOLDER, PANELS, TARGETS, Target, variables

EXCLUSIONS = yaml.safe_load((FOLDER / "dashboards" / "json" / ".lint").read_text("utf-8"))["exclusions"]
# of those that Grafana knows, the ones in use
UNITS = {"none", "short", "percentunit", "s"}


def _id(value: Any) -> str:
    return value if isinstance(value, str) else str(value["title"])


every_dashboard = pytest.mark.parametrize("name", sorted(DASHBOARDS))
every_panel = pytest.mark.parametrize(("name", "panel"), PANELS, ids=_id)
every_target = pytest.mark.parametrize("target", TARGETS, ids=str)


def _is_excluded(rule: str, target: Target) -> bool:
    place = {"dashboard": DASHBOARDS[target.dashboard]["title"], "panel": target.panel["title"]}
    return place in EXCLUSIONS.get(rule, {"entries": []})["entries"]


def _selectors(expr: str) -> list[str]:
    return re.findall(r"\{([^{}]*)\}", expr)


@every_dashboard
def test_template_datasource_rule(name: str) -> None:
    source = variables(DASHBOARDS[name])["datasource"]
    assert (source["type"], source["query"], source["label"]) == ("datasource", "prometheus", "Data source")


@pytest.mark.parametrize("label", ["job", "instance"])
@every_dashboard
def test_template_job_and_instance_rules(name: str, label: str) -> None:
    variable = variables(DASHBOARDS[name])[label]
    assert (variable["type"], variable["datasource"]["uid"]) == ("query", "${datasource}")
    assert (variable["label"], variable["multi"], variable["allValue"]) == (label.capitalize(), True, ".+")


@every_dashboard
def test_template_label_promql_and_reload_rules(name: str) -> None:
    for variable in variables(DASHBOARDS[name]).values():
        if variable["type"] == "query":
            assert re.fullmatch(rf"label_values\(moe_\w+(\{{.*\}})?, {variable['name']}\)", variable["query"]["query"])
            assert variable["refresh"] == 2  # when the time range changes


@every_panel
def test_panel_datasource_rule(name: str, panel: dict[str, Any]) -> None:
    sources = [panel["datasource"], *(query["datasource"] for query in panel.get("targets", ()))]
    assert {(source["type"], source["uid"]) for source in sources} == {("prometheus", "${datasource}")}


@every_panel
def test_panel_title_description_rule(name: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"]


@every_panel
def test_panel_units_rule(name: str, panel: dict[str, Any]) -> None:
    if panel["type"] != "alertlist":
        units = [panel["fieldConfig"]["defaults"]["unit"]]
        for override in panel["fieldConfig"]["overrides"]:
            units += [each["value"] for each in override["properties"] if each["id"] == "unit"]
        assert set(units) <= UNITS


@every_panel
def test_panel_no_targets_rule(name: str, panel: dict[str, Any]) -> None:
    assert panel.get("targets") or panel["type"] == "alertlist"


@every_target
def test_target_rate_interval_rule(target: Target) -> None:
    assert set(re.findall(r"\[([^\]]*)\]", target.expr)) <= {"$__rate_interval"}


@every_target
def test_target_job_rule(target: Target) -> None:
    assert all('job=~"$job"' in selector for selector in _selectors(target.expr))


@every_target
def test_target_instance_rule(target: Target) -> None:
    has_all = all('instance=~"$instance"' in selector for selector in _selectors(target.expr))
    assert has_all is not _is_excluded("target-instance-rule", target)


@every_target
def test_target_counter_agg_rule(target: Target) -> None:
    counters = re.findall(r"(\w+)\(moe_\w+_total\{[^}]*\}(\[?)", target.expr) + re.findall(
        r"(\w* ?)\((moe_\w+_total)\{[^}]*\}\)", target.expr
    )
    is_aggregated = all(function in {"rate", "increase"} and bracket == "[" for function, bracket in counters)
    assert is_aggregated is not _is_excluded("target-counter-agg-rule", target)


@every_dashboard
def test_uneditable_dashboard_rule(name: str) -> None:
    assert DASHBOARDS[name]["editable"] is False


def test_every_exception_is_of_a_panel_that_exists_and_has_a_reason() -> None:
    there = {(DASHBOARDS[name]["title"], panel["title"]) for name, panel in PANELS}
    for rule in EXCLUSIONS.values():
        assert rule["reason"]
        assert {(entry["dashboard"], entry["panel"]) for entry in rule["entries"]} <= there

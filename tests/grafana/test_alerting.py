"""The alerts that Grafana evaluates are those of the Prometheus rules, and their file is one that Grafana reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_telemetry.cli import main
from tests.grafana.dashboard_files import DASHBOARDS, FOLDER, panels

PROVISIONED: dict[str, Any] = yaml.safe_load((FOLDER / "provisioning" / "alerting" / "moe-telemetry.yaml").read_text())
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule | {"group": group["name"]}
    for path in sorted((FOLDER / "rules").glob("*.yaml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
COPIES: dict[str, dict[str, Any]] = {
    rule["title"]: rule | {"group": group["name"]} for group in PROVISIONED["groups"] for rule in group["rules"]
}
# fields of Grafana's file provisioning, and what is known of their values
FIELDS = {
    "uid",
    "title",
    "condition",
    "data",
    "dashboardUid",
    "panelId",
    "noDataState",
    "execErrState",
    "missing_series_evals_to_resolve",
    "for",
    "labels",
    "annotations",
}
LINKS = {"__dashboardUid__", "__panelId__"}

every_alert = pytest.mark.parametrize("name", sorted(RULES))


def test_the_same_alerts_exist_once_each() -> None:
    assert COPIES.keys() == RULES.keys()
    assert sum(len(group["rules"]) for group in PROVISIONED["groups"]) == len(RULES) == 10


@every_alert
def test_condition_time_labels_and_group_are_the_rules(name: str) -> None:
    rule, copy = RULES[name], COPIES[name]
    assert copy["data"][0]["model"]["expr"] == rule["expr"]
    assert (copy["for"], copy["labels"], copy["group"]) == (rule["for"], rule["labels"], rule["group"])


@every_alert
def test_words_are_the_rules_with_grafanas_name_for_the_value(name: str) -> None:
    told = {key: text for key, text in COPIES[name]["annotations"].items() if key not in LINKS}
    assert {key: text.replace("$values.A.Value", "$value") for key, text in told.items()} == RULES[name]["annotations"]
    assert not any(re.search(r"\$value\b", text) for text in told.values())


@every_alert
def test_an_alert_fires_for_every_number_of_its_query_also_for_0(name: str) -> None:
    query, condition = COPIES[name]["data"]
    assert (query["model"]["instant"], query["model"]["range"]) == (True, False)
    assert (condition["model"]["type"], condition["model"]["expression"]) == ("math", "is_number($A)")
    assert condition["datasourceUid"] == condition["model"]["datasource"]["uid"] == "__expr__"
    assert COPIES[name]["condition"] == condition["refId"] == condition["model"]["refId"] == "B"
    assert query["refId"] == query["model"]["refId"] == "A"


@every_alert
def test_absent_data_and_a_prometheus_that_is_down_never_fire(name: str) -> None:
    states = {key: COPIES[name][key] for key in ("noDataState", "execErrState", "missing_series_evals_to_resolve")}
    assert states == {"noDataState": "OK", "execErrState": "KeepLast", "missing_series_evals_to_resolve": 1}


@every_alert
def test_an_alert_leads_to_a_panel_that_shows_it(name: str) -> None:
    copy = COPIES[name]
    assert copy["annotations"]["__dashboardUid__"] == copy["dashboardUid"]
    assert copy["annotations"]["__panelId__"] == str(copy["panelId"])
    (panel,) = [each for each in panels(DASHBOARDS[copy["dashboardUid"]]) if each["id"] == copy["panelId"]]
    assert panel["links"][0]["url"].endswith(f"#{name.lower()}")


@every_alert
def test_an_alert_has_the_fields_that_grafana_reads_and_no_other(name: str) -> None:
    copy = {key: value for key, value in COPIES[name].items() if key != "group"}
    assert copy.keys() == FIELDS
    assert re.fullmatch(r"[a-z0-9-]{1,40}", copy["uid"])
    assert re.fullmatch(r"\d+m", copy["for"])
    assert all(isinstance(value, str) for value in (copy["annotations"] | copy["labels"]).values())
    for query in copy["data"]:
        assert query.keys() == {"refId", "relativeTimeRange", "datasourceUid", "model"}
        assert query["relativeTimeRange"]["from"] > query["relativeTimeRange"]["to"] == 0


def test_groups_have_a_name_a_folder_and_an_interval() -> None:
    assert PROVISIONED["apiVersion"] == 1
    for group in PROVISIONED["groups"]:
        assert group.keys() == {"orgId", "name", "folder", "interval", "rules"}
        assert (group["orgId"], group["interval"]) == (1, "1m")
    assert len({rule["uid"] for rule in COPIES.values()}) == len(COPIES)


def test_nothing_in_the_files_reads_an_environment_variable() -> None:
    # Grafana fills in ${NAME} in them
    for path in (FOLDER / "provisioning").rglob("*.yaml"):
        assert "${" not in path.read_text()


def test_data_source_and_provider_are_of_the_form_that_grafana_reads() -> None:
    (source,) = yaml.safe_load((FOLDER / "provisioning" / "datasources" / "moe-telemetry.yaml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["access"]) == ("prometheus", "proxy")
    assert {query["datasourceUid"] for copy in COPIES.values() for query in copy["data"]} == {source["uid"], "__expr__"}
    (provider,) = yaml.safe_load((FOLDER / "provisioning" / "dashboards" / "moe-telemetry.yaml").read_text())[
        "providers"
    ]
    assert (provider["type"], list(provider["options"])) == ("file", ["path"])
    assert {group["folder"] for group in PROVISIONED["groups"]} == {provider["folder"]}


# the command


def _written(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


DASHBOARD_FILES = {f"dashboards/{name}.json" for name in DASHBOARDS}
ALWAYS = DASHBOARD_FILES | {"provisioning/dashboards/moe-telemetry.yaml", "runbook.md"}
SOURCE, ALERTS = "provisioning/datasources/moe-telemetry.yaml", "provisioning/alerting/moe-telemetry.yaml"


def test_the_command_writes_dashboards_with_their_provisioning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "etc" / "grafana"
    assert main(["dashboards", "--out", str(out)]) == 0
    assert _written(out) == ALWAYS | {SOURCE}
    assert set(capsys.readouterr().out.splitlines()) == {str(out / name) for name in _written(out)}
    assert {path.stem: json.loads(path.read_text()) for path in (out / "dashboards").iterdir()} == DASHBOARDS


def test_grafana_finds_the_dashboards_where_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dashboards", "--out", "here, 'there' & \"there\""]) == 0
    folder = tmp_path / "here, 'there' & \"there\""
    (provider,) = yaml.safe_load((folder / "provisioning" / "dashboards" / "moe-telemetry.yaml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"] == str(folder / "dashboards")


def test_alerts_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    assert main(["dashboards", "--out", str(tmp_path), "--alerts"]) == 0
    assert _written(tmp_path) == ALWAYS | {SOURCE, ALERTS}
    assert yaml.safe_load((tmp_path / ALERTS).read_text()) == PROVISIONED


def test_a_data_source_that_exists_is_used_everywhere_and_not_provisioned(tmp_path: Path) -> None:
    assert main(["dashboards", "--out", str(tmp_path), "--alerts", "--datasource", "mimir"]) == 0
    assert _written(tmp_path) == ALWAYS | {ALERTS}
    groups = yaml.safe_load((tmp_path / ALERTS).read_text())["groups"]
    uids = {query["datasourceUid"] for group in groups for rule in group["rules"] for query in rule["data"]}
    assert uids == {"mimir", "__expr__"}
    for name in DASHBOARD_FILES:
        source = json.loads((tmp_path / name).read_text())["templating"]["list"][0]
        assert (source["name"], source["current"]["value"]) == ("datasource", "mimir")


def test_panels_and_alerts_link_to_the_runbook_where_it_is(tmp_path: Path) -> None:
    # an address with the names that are replaced elsewhere stays as it is
    address = "https://wiki.example/moe-prometheus/runbook.md"
    source = ["--datasource", "mimir"]
    assert main(["dashboards", "--out", str(tmp_path), "--alerts", "--runbook-url", address, *source]) == 0
    links = re.findall(r"runbook_url: (\S+)#", (tmp_path / ALERTS).read_text())
    assert links == [address] * len(RULES)
    for name in DASHBOARD_FILES:
        constants = [
            each
            for each in json.loads((tmp_path / name).read_text())["templating"]["list"]
            if each["name"] == "runbook"
        ]
        assert [each["query"] for each in constants] == [address]


def test_what_an_earlier_call_wrote_and_grafana_still_reads_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboards", "--out", str(tmp_path), "--alerts"]) == 0
    assert main(["dashboards", "--out", str(tmp_path), "--alerts"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["dashboards", "--out", str(tmp_path), "--datasource", "mimir"]) == 0
    assert _written(tmp_path) == ALWAYS | {SOURCE, ALERTS}
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is of an earlier call")[0] for line in lines] == [
        str(tmp_path / ALERTS),
        str(tmp_path / SOURCE),
    ]


@pytest.mark.parametrize("uid", ["", "two words", "a/b", "x" * 41, "ü"])
def test_a_data_source_with_no_possible_uid_is_refused(
    tmp_path: Path, uid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dashboards", "--out", str(tmp_path), "--datasource", uid])
    assert ended.value.code == 2
    assert "expected a uid of up to 40 letters" in capsys.readouterr().err

"""Every query of every dashboard, asked of a real Prometheus that has half an hour of a real exposition."""

from __future__ import annotations

import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.grafana.dashboard_files import DASHBOARDS, FOLDER, TARGETS, Target, variables
from tests.stack.processes import wait_until
from tests.stack.prometheus_server import Prometheus, prometheus_running
from tests.stack.recorded_run import (
    FINISHED_RUN,
    INSTANCES,
    INTERVAL_SECONDS,
    JOB,
    LAYERS,
    RUN,
    STAGES,
    TOKENS_PER_STEP,
    write_history,
)

pytestmark = pytest.mark.stack

_CONFIG = "global: {{evaluation_interval: 1s}}\nrule_files: ['{rules}/*.yaml']\n"
# what a panel of usual width asks for, with a scrape every 15 s
STEP_SECONDS = 60
EVERYTHING = {
    "job": ".+",
    "instance": ".+",
    "run": RUN,
    "stage": "train",
    "block": ".+",
    "layer": ".+",
    "__rate_interval": "1m",
}
SOME = {**EVERYTHING, "job": JOB, "instance": "(node0:9464|node1:9464)", "block": "decoder", "layer": "(9|10)"}

Series = list[dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("dashboards")
    write_history(time.time(), folder)
    with prometheus_running(_CONFIG.format(rules=FOLDER / "rules"), folder) as server:
        recorded = 'count({__name__=~"job_run:.*", run="' + RUN + '"})'
        wait_until(lambda: server.query(recorded) == {(): 6.0}, "the rules have recorded")
        yield server


def _ask(server: Prometheus, path: str, **parameters: str) -> Any:
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{server.url}/api/v1/{path}?{query}", timeout=30) as response:
        answer = json.load(response)
    assert answer["status"] == "success", answer
    assert answer.get("warnings", []) == []
    return answer["data"]


def _answer(server: Prometheus, target: Target, values: Mapping[str, str]) -> Series:
    """Return the series of a target, each with its `values`, as Grafana would ask for them."""
    expr = substituted(target.expr, values)
    now = time.time()
    if target.query["instant"]:
        found: Series = _ask(server, "query", query=expr, time=str(now))["result"]
        return [{**series, "values": [series["value"]]} for series in found]
    times = {"start": str(now - 1800), "end": str(now), "step": str(STEP_SECONDS)}
    answered: Series = _ask(server, "query_range", query=expr, **times)["result"]
    return answered


def substituted(text: str, values: Mapping[str, str]) -> str:
    """Return a query with its variables filled in; one that is unknown is an error."""
    return re.sub(r"\$([a-z_]+)", lambda found: values[found[1]], text)


@pytest.mark.parametrize("values", [EVERYTHING, SOME], ids=["all", "some"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_query_has_an_answer_of_numbers_with_the_labels_of_its_legend(
    server: Prometheus, target: Target, values: Mapping[str, str]
) -> None:
    answer = _answer(server, target, values)
    assert answer
    assert [series["metric"] for series in answer if not target.legend_labels <= series["metric"].keys()] == []
    numbers = [float(value) for series in answer for _, value in series["values"]]
    assert [number for number in numbers if math.isnan(number)] == []


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_no_two_series_of_a_panel_have_one_name(server: Prometheus, target: Target) -> None:
    labels = target.legend_labels or {"block", "layer"}  # rows of a table
    names = [tuple(series["metric"].get(label) for label in sorted(labels)) for series in _answer(server, target, SOME)]
    if target.panel["type"] != "table":
        assert len(names) == len(set(names))


@pytest.mark.parametrize("target", [each for each in TARGETS if "layer" in each.legend_labels], ids=str)
def test_only_the_chosen_layers_are_shown(server: Prometheus, target: Target) -> None:
    assert {series["metric"]["layer"] for series in _answer(server, target, SOME)} <= {"9", "10"}


@pytest.mark.parametrize("target", [each for each in TARGETS if "row" in each.legend_labels], ids=str)
def test_rows_of_layers_come_in_the_order_of_the_model(server: Prometheus, target: Target) -> None:
    rows = [series["metric"]["row"] for series in _answer(server, target, EVERYTHING)]
    assert rows == [layer.zfill(3) for layer in LAYERS]


def test_the_tokens_of_a_job_are_those_of_all_its_endpoints(server: Prometheus) -> None:
    (target,) = [each for each in TARGETS if str(each) == "moe-overview: Tokens per second A"]
    (series,) = _answer(server, target, EVERYTHING)
    assert float(series["values"][10][1]) == pytest.approx(TOKENS_PER_STEP / INTERVAL_SECONDS, rel=0.01)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_finds_its_values(server: Prometheus, name: str) -> None:
    expected = {
        "job": [JOB],
        "instance": list(INSTANCES),
        "run": [FINISHED_RUN, RUN],
        "stage": sorted(STAGES),
        "block": ["decoder"],
        "layer": sorted(LAYERS),
    }
    for variable in variables(DASHBOARDS[name]).values():
        if variable["type"] == "query":
            assert _values(server, variable["query"]["query"]) == expected[variable["name"]]


def _values(server: Prometheus, query: str) -> list[str]:
    match = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
    assert match is not None, query
    found: list[str] = _ask(server, f"label/{match[2]}/values", **{"match[]": substituted(match[1], EVERYTHING)})
    return sorted(found)


def test_the_rules_see_the_same_run_and_not_the_finished_one(server: Prometheus) -> None:
    def failing() -> set[tuple[str, ...]]:
        alerts = set(server.query("ALERTS", "alertname", "run"))
        return alerts if ("MoeTelemetryExporterFailing", RUN) in alerts else set()

    assert {run for _, run in wait_until(failing, "the alert on exporters is pending")} == {RUN}

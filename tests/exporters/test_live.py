"""LiveView: the document of the live page, bounded over time, right to the figure."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from moe_telemetry import Counts, Health, LayerSnapshot, RouterKey, Snapshot
from moe_telemetry.load import LoadStats
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.live import LiveView
from moe_telemetry_exporters.live.curves import MAX_POINTS, MEASURES
from moe_telemetry_exporters.live.view import MAX_STAGES

ODD = 'a"b\\c\nd{e}=100%s</script><script>alert(1)</script>,é漢🙂'
START = 1_700_000_000.0
HEALTHY = Health(routers_expected=1, routers_observed=1)


class Clock:
    """The time of a test."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock: Clock) -> LiveView:
    return LiveView(clock)


def _loads(*assignments: int, stage: str = "train", health: Health = HEALTHY, **values: Any) -> Snapshot:
    """A snapshot of one layer of top-1 routing."""
    counts = Counts(tokens=sum(assignments), assignments=assignments)
    layer = LayerSnapshot(num_experts=len(assignments), total={stage: counts}, window={stage: counts}, share={})
    return replace(make_snapshot(num_layers=0), layers={RouterKey("decoder", 1): layer}, health=health, **values)


def _show(view: LiveView, clock: Clock, snapshot: Snapshot, after: float = 0.0) -> None:
    clock.now += after
    view.show(replace(snapshot, time=clock.now))


def _alerts(view: LiveView) -> Mapping[str, Mapping[str, Any]]:
    return {alert["name"]: alert for alert in view.document()["alerts"]}


# what it shows


def test_before_the_first_snapshot_it_waits(view: LiveView) -> None:
    document = view.document()
    assert document["state"] == "waiting"
    assert "layers" not in document


def test_a_layer_has_the_numbers_of_the_snapshot(view: LiveView) -> None:
    snapshot = make_snapshot(num_layers=2, replayed=True, first_layer=3)
    view.show(snapshot)
    first, second = view.document()["layers"]
    assert (first["key"], second["key"]) == ("decoder.3", "decoder.4")
    layer = snapshot.layers[RouterKey("decoder", 3)]
    counts = layer.window["train"]
    stats, scores, replay = LoadStats.of(counts.assignments), counts.scores, layer.replay
    assert stats is not None
    assert scores is not None
    assert replay is not None
    assert first["tokens"] == counts.tokens
    assert first["max_violation"] == pytest.approx(stats.max_violation, abs=1e-4)
    assert first["min_violation"] == pytest.approx(stats.min_violation, abs=1e-4)
    assert first["load_entropy"] == pytest.approx(stats.entropy, abs=1e-4)
    assert first["gini"] == pytest.approx(stats.gini, abs=1e-4)
    assert first["hottest_expert"] == counts.assignments.index(max(counts.assignments))
    assert (first["score_entropy"], first["boundary_margin"]) == (scores.entropy, scores.boundary_margin)
    assert first["agreement"] == pytest.approx(replay.agreement, abs=1e-4)
    assert (first["zero_overlap"], first["coverage"]) == (0.005, pytest.approx(replay.coverage, abs=1e-4))


def test_the_heatmap_is_the_load_in_hundredths_of_the_mean_and_nothing_but_none_is_zero(view: LiveView) -> None:
    view.show(_loads(0, 1, 10_000, 9_999))
    assert view.document()["load_percent"] == [[0, 1, 200, 200]]


def test_a_layer_without_tokens_is_in_the_table_without_ratios(view: LiveView) -> None:
    snapshot = _loads(3, 1)
    empty = LayerSnapshot(num_experts=2, total={}, window={}, share={})
    view.show(replace(snapshot, layers={**snapshot.layers, RouterKey("decoder", 2): empty}))
    document = view.document()
    assert document["load_percent"] == [[150, 50], None]
    assert [row["max_violation"] for row in document["layers"]] == [0.5, None]


def test_a_large_model_is_a_document_of_less_than_150_kilobytes(view: LiveView, clock: Clock) -> None:
    snapshot = make_snapshot(num_layers=61, num_experts=256, top_k=8, tokens_per_step=4096, replayed=True)
    for _ in range(3 * MAX_POINTS):
        _show(view, clock, snapshot, 1)
    document = view.document(layer="decoder.3")
    assert len(document["curves"]["time"]) == MAX_POINTS
    assert len(json.dumps(document, separators=(",", ":"), allow_nan=False)) < 150_000


@pytest.mark.parametrize(
    "snapshot",
    [
        make_snapshot(run=ODD, labels={"team": ODD}, stages=("train", ODD)),
        make_snapshot(num_layers=0),
        make_snapshot(window_steps=0),
        make_snapshot(num_experts=1, top_k=1),
    ],
    ids=["odd text", "no layer", "empty window", "one expert"],
)
def test_a_document_is_json_without_nan(view: LiveView, snapshot: Snapshot) -> None:
    view.show(snapshot)
    read = json.loads(json.dumps(view.document(stage=ODD, layer=ODD), allow_nan=False))
    assert (read["run"], read["labels"]) == (snapshot.run, dict(snapshot.labels))


def test_a_node_that_does_not_lead_shows_the_whole_job_and_says_so(view: LiveView) -> None:
    view.show(make_snapshot(node=1, num_nodes=2))
    document = view.document()
    assert (document["leads"], document["world_size"], len(document["layers"])) == (False, 2, 3)
    assert document["layers"][0]["tokens"] == 2560


# stages and windows


def test_training_is_shown_first_and_any_stage_can_be_asked_for(view: LiveView) -> None:
    view.show(make_snapshot(stages=("eval", "train", "rollout")))
    assert [view.document(stage=stage)["stage"] for stage in (None, "rollout", "nonsense")] == [
        "train",
        "rollout",
        "train",
    ]
    assert set(view.document()["stages"]) == {"eval", "train", "rollout"}


def test_without_training_the_busiest_stage_is_shown(view: LiveView) -> None:
    view.show(_loads(5, 5, stage="serve"))
    assert view.document()["stage"] == "serve"


def test_a_stage_keeps_its_last_window_while_others_go_on(view: LiveView, clock: Clock) -> None:
    _show(view, clock, _loads(4, 4, stage="eval", step=10))
    _show(view, clock, _loads(6, 2, step=20), after=30)
    document = view.document(stage="eval")
    assert document["window"] == {"step": 10, "age_seconds": 30}
    assert document["layers"][0]["tokens"] == 8
    assert document["step"] == 20


def test_the_empty_window_at_the_end_of_a_run_leaves_the_table_as_it_was(view: LiveView, clock: Clock) -> None:
    _show(view, clock, make_snapshot(step=10))
    _show(view, clock, make_snapshot(step=20, window_steps=0), after=1)
    document = view.document()
    assert (document["step"], document["window"]["step"]) == (20, 10)
    assert document["layers"][0]["tokens"] == 2560


def test_of_ever_new_stages_only_the_last_are_kept(view: LiveView, clock: Clock) -> None:
    for number in range(3 * MAX_STAGES):
        _show(view, clock, _loads(1, 1, stage=f"stage{number}"), after=1)
    assert view.document()["stages"] == [f"stage{number}" for number in range(2 * MAX_STAGES, 3 * MAX_STAGES)]


# curves


def test_curves_are_bounded_and_span_an_hour_however_often_a_job_exports(view: LiveView, clock: Clock) -> None:
    for _ in range(4500):
        _show(view, clock, _loads(5, 3), 1)
    times = view.document()["curves"]["time"]
    assert len(times) == MAX_POINTS
    assert times[-1] == clock.now
    assert 3500 < times[-1] - times[0] <= 3600
    assert max(later - earlier for earlier, later in pairwise(times)) <= 32


def test_of_windows_that_share_a_point_the_worst_is_kept(view: LiveView, clock: Clock) -> None:
    for number in range(2000):
        _show(view, clock, _loads(*(10, 0) if number == 700 else (5, 5)), 1)
    measures = view.document()["curves"]["measures"]
    assert (max(measures["max_violation"]["worst"]), max(measures["dead"]["worst"])) == (1, 1)
    assert min(measures["load_entropy"]["worst"]) == 0
    assert measures["max_violation"]["worst"][-1] == 0


def test_tokens_a_second_are_right_over_merged_points_and_absent_after_a_step_back(
    view: LiveView, clock: Clock
) -> None:
    for step in range(1, 1000):
        _show(view, clock, make_snapshot(step=step, num_layers=1, window_steps=1), 2)
    rates = view.document()["curves"]["tokens_per_second"]
    assert rates[0] is None
    assert set(rates[1:]) == {128}
    _show(view, clock, make_snapshot(step=5, num_layers=1, window_steps=1), 2)
    assert view.document()["curves"]["tokens_per_second"][-1] is None


def test_curves_have_the_worst_the_median_and_the_layer_that_was_asked_for(view: LiveView, clock: Clock) -> None:
    of = {
        number: _loads(*loads).layers[RouterKey("decoder", 1)] for number, loads in enumerate([(6, 2), (5, 3), (4, 4)])
    }
    snapshot = replace(_loads(1, 1), layers={RouterKey("decoder", number): layer for number, layer in of.items()})
    _show(view, clock, snapshot)
    measure = view.document(layer="decoder.2")["curves"]["measures"]["max_violation"]
    assert measure == {"worst": [0.5], "median": [0.25], "layer": [0.0]}
    assert view.document(layer="decoder.9")["curves"]["measures"]["max_violation"]["layer"] is None
    assert view.document()["curves"]["measures"]["agreement"] is None


def test_layers_that_come_and_go_leave_gaps_and_no_failure(view: LiveView, clock: Clock) -> None:
    for number in range(2 * MAX_POINTS):
        _show(view, clock, make_snapshot(num_layers=1 + number % 3, first_layer=number % 2), 1)
    own = view.document(layer="decoder.1")["curves"]["measures"]["max_violation"]["layer"]
    assert {value is None for value in own} == {True, False}


def test_a_clock_that_is_set_back_leaves_no_point_in_the_future(view: LiveView, clock: Clock) -> None:
    for after in (10, 10, -300, 10):
        _show(view, clock, _loads(5, 3), after)
    times = view.document()["curves"]["time"]
    assert times == sorted(times)
    assert times[-1] == clock.now


def test_every_limit_is_of_a_measure(view: LiveView) -> None:
    view.show(make_snapshot())
    assert set(view.document()["limits"]) < set(MEASURES)


# states and alerts


@pytest.mark.parametrize(
    ("gaps", "age", "state"),
    [
        ([], 119, "live"),
        ([], 121, "late"),
        ([1, 1], 14, "live"),
        ([1, 1], 16, "late"),
        ([60, 60], 299, "live"),
        ([60, 60], 301, "late"),
    ],
)
def test_a_view_is_late_after_several_usual_gaps(
    view: LiveView, clock: Clock, gaps: list[float], age: float, state: str
) -> None:
    for gap in [0, *gaps]:
        _show(view, clock, make_snapshot(), gap)
    clock.now += age
    assert view.document()["state"] == state


def test_a_finished_run_is_neither_late_nor_alarming(view: LiveView, clock: Clock) -> None:
    _show(view, clock, _loads(8, 0))
    assert set(_alerts(view)) == {"MoeExpertsDead"}
    _show(view, clock, _loads(8, 0, health=replace(HEALTHY, run_finished=True)), 1)
    clock.now += 10_000
    assert (view.document()["state"], view.document()["alerts"]) == ("finished", [])


def test_an_alert_is_pending_until_it_has_stood_as_long_as_its_rule_asks_for(view: LiveView, clock: Clock) -> None:
    _show(view, clock, _loads(5, 5))
    for _ in range(90):
        _show(view, clock, _loads(10, 0), 10)
    alert = _alerts(view)["MoeExpertsDead"]
    assert (alert["state"], alert["since"], alert["layer"]) == ("pending", START + 10, "decoder.1")
    _show(view, clock, _loads(10, 0), 10)
    assert _alerts(view)["MoeExpertsDead"]["state"] == "firing"
    _show(view, clock, _loads(5, 5), 10)
    assert _alerts(view) == {}
    _show(view, clock, _loads(10, 0), 10)
    assert _alerts(view)["MoeExpertsDead"]["since"] == clock.now


def test_an_alert_outlives_a_window_that_says_nothing_about_it_for_ten_minutes(view: LiveView, clock: Clock) -> None:
    bad = make_snapshot(num_layers=1, replayed=True)
    (key, layer), *_ = bad.layers.items()
    counts = layer.window["train"]
    assert counts.replay is not None
    replay = replace(counts.replay, zero_overlap=counts.replay.checked)
    window = {"train": replace(counts, replay=replay)}
    _show(view, clock, replace(bad, layers={key: replace(layer, window=window)}))
    for after, stands in ((300, True), (299, True), (2, False)):
        _show(view, clock, make_snapshot(num_layers=1, window_steps=0), after)
        assert ("MoeReplayZeroOverlapHigh" in _alerts(view)) == stands


def test_when_exports_stop_only_that_is_news(view: LiveView, clock: Clock) -> None:
    for _ in range(3):
        _show(view, clock, _loads(10, 0), 200)
    clock.now += 599
    assert set(_alerts(view)) == {"MoeExpertsDead"}
    clock.now += 1
    assert _alerts(view) == {}
    clock.now += 450  # five usual gaps and 50 seconds after the last export
    assert _alerts(view)["MoeTelemetryStalled"]["state"] == "pending"
    clock.now += 10
    assert _alerts(view)["MoeTelemetryStalled"]["state"] == "firing"


def test_failures_of_an_exporter_count_for_half_an_hour(view: LiveView, clock: Clock) -> None:
    failing = replace(HEALTHY, export_errors={"wandb": 3})
    _show(view, clock, _loads(5, 5))
    _show(view, clock, _loads(5, 5, health=failing), 60)
    assert _alerts(view)["MoeTelemetryExporterFailing"]["exporter"] == "wandb"
    for _ in range(15):
        _show(view, clock, _loads(5, 5, health=failing), 120)
    assert _alerts(view) == {}


def test_documents_can_be_asked_for_while_snapshots_come(view: LiveView, clock: Clock) -> None:
    snapshots = [make_snapshot(step=step, stages=("train", "eval"), replayed=True) for step in range(1, 40)]
    failures: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(60):
                json.dumps(view.document(stage="eval", layer="decoder.1"))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for snapshot in 5 * snapshots:
        _show(view, clock, snapshot, 1)
    for reader in readers:
        reader.join()
    assert failures == []


def test_the_next_run_at_an_endpoint_begins_with_nothing_of_the_last(view: LiveView, clock: Clock) -> None:
    for _ in range(3):
        _show(view, clock, _loads(0, 8, stage="rollout"), after=600)
        _show(view, clock, _loads(0, 8, 8, 8), after=600)
    assert set(_alerts(view)) == {"MoeExpertsDead"}
    _show(view, clock, _loads(0, 4, 4, 4, run="run-2"), after=2)
    document = view.document()
    assert (document["run"], document["stages"], len(document["curves"]["time"])) == ("run-2", ["train"], 1)
    assert document["usual_gap_seconds"] is None
    assert [alert["since"] for alert in document["alerts"]] == [clock.now]

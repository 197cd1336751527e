"""The scalars of a snapshot, as W&B and TensorBoard have them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from moe_telemetry import METRICS, Snapshot
from moe_telemetry.charts import BY_LAYER, FIRST_LOOK, tag
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.scalars import scalars

MAX_VIOLATION = "moe/load_max_violation_ratio"


def _with_logit_max(snapshot: Snapshot, value: float) -> Snapshot:
    """Return the snapshot with one layer's largest logit replaced, and the layer's entropy taken away."""
    key, layer = next(iter(snapshot.layers.items()))
    counts = layer.window["train"]
    assert counts.scores is not None
    changed = replace(counts, scores=replace(counts.scores, logit_max=value, entropy=value))
    return replace(snapshot, layers={**snapshot.layers, key: replace(layer, window={"train": changed})})


def test_tokens_are_shown_by_layer_and_other_counters_over_layers() -> None:
    tags = dict(scalars(make_snapshot(step=30)))
    assert tags["moe/router_tokens/decoder.2"] == 30 * 256
    assert tags["moe/router_dropped_assignments/mean"] == 30 * 4
    assert "moe/router_dropped_assignments/decoder.2" not in tags


def test_other_stages_than_train_are_named_in_the_tag() -> None:
    tags = dict(scalars(make_snapshot(stages=("train", "eval"))))
    assert f"{MAX_VIOLATION}/eval/decoder.0" in tags
    assert f"{MAX_VIOLATION}/eval/p90" in tags
    assert f"{MAX_VIOLATION}/decoder.0" in tags


def test_what_is_of_the_whole_job_has_a_tag_without_a_layer() -> None:
    snapshot = make_snapshot(step=1024, expert_parallel_ranks=4, stages=("train", "eval"))
    tags = dict(scalars(replace(snapshot, health=replace(snapshot.health, export_errors={"wandb": 2}))))
    assert tags["moe/telemetry_routers_observed"] == 3
    assert tags["moe/telemetry_overhead_seconds"] == 1
    assert tags["moe/telemetry_export_errors/wandb"] == 2
    assert 0 < tags["moe/ep_balancedness_ratio"] <= 1
    assert 0 < tags["moe/ep_balancedness_ratio/eval"] <= 1


def test_a_stage_that_saw_nothing_in_the_window_is_left_out() -> None:
    assert {name.split("_")[0] for name, _ in scalars(make_snapshot(window_steps=0))} == {"moe/telemetry"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_absent_and_spoils_no_mean(value: float) -> None:
    tags = dict(scalars(_with_logit_max(make_snapshot(), value)))
    assert "moe/score_entropy_ratio/decoder.0" not in tags
    assert tags["moe/score_entropy_ratio/decoder.1"] == 0.75
    assert tags["moe/logit_max/mean"] == tags["moe/logit_max/max"] == 7.5


@pytest.mark.parametrize("num_layers", [16, 61])
@pytest.mark.parametrize("per_expert", [False, True])
def test_a_snapshot_has_at_most_ten_tags_a_layer_even_with_per_expert_series(
    num_layers: int, *, per_expert: bool
) -> None:
    tags = [name for name, _ in scalars(make_snapshot(num_layers=num_layers, num_experts=64, per_expert=per_expert))]
    assert len(tags) == len(set(tags))
    assert len(tags) <= 10 * num_layers


@pytest.mark.parametrize("num_layers", [1, 16, 61])
def test_with_all_that_can_be_on_seven_tags_a_layer_and_a_fixed_number_more(num_layers: int) -> None:
    snapshot = make_snapshot(num_layers=num_layers, num_experts=64, replayed=True, expert_parallel_ranks=8)
    assert len(dict(scalars(snapshot))) <= 7 * num_layers + 120


def test_tags_stay_the_same_when_other_experts_get_hot() -> None:
    names = {name for seed in range(20) for name, _ in scalars(make_snapshot(seed=seed, replayed=True))}
    assert names == {name for name, _ in scalars(make_snapshot(replayed=True))}


def test_metrics_by_layer_are_in_the_table() -> None:
    assert set(METRICS) >= BY_LAYER


@pytest.mark.parametrize("chart", [chart for section in FIRST_LOOK for chart in section.charts], ids=lambda c: c.title)
def test_every_chart_of_the_first_look_finds_its_lines(chart: object) -> None:
    pattern = re.compile(getattr(chart, "pattern", ""))
    found = [name for name, _ in scalars(make_snapshot(replayed=True, stages=("train", "eval"))) if pattern.match(name)]
    assert found
    assert all("/eval" not in name for name in found)


def test_the_tag_of_a_metric_says_stage_and_layer() -> None:
    assert tag("moe_router_tokens_total", "decoder.3") == "moe/router_tokens/decoder.3"
    assert tag("moe_router_tokens_total", "mean", stage="eval") == "moe/router_tokens/eval/mean"
    assert tag("moe_expert_relative_load") == "moe/expert_relative_load"

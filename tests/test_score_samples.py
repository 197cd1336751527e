"""From scores and the shape of the load to samples."""

from __future__ import annotations

import pytest
from torch import nn

import moe_telemetry as mt
from moe_telemetry.records import Counts, Health, LayerSnapshot
from moe_telemetry.score_metrics import LOAD_SHAPE_METRICS, SCORE_METRICS
from moe_telemetry.testing import make_snapshot


def _snapshot(
    *loads: tuple[int, ...], num_ranks: int | None = 2, placement: tuple[int, ...] | None = None
) -> mt.Snapshot:
    layers = {
        mt.RouterKey("decoder", number): LayerSnapshot(
            num_experts=len(load), total={}, window={"train": Counts(tokens=1, assignments=load)}, share={}
        )
        for number, load in enumerate(loads)
    }
    health = Health(routers_expected=len(loads), routers_observed=len(loads))
    return mt.Snapshot(
        run="r",
        step=1,
        time=0.0,
        world_size=1,
        layers=layers,
        health=health,
        expert_parallel_ranks=num_ranks,
        expert_placement=placement,
    )


def _values(snapshot: mt.Snapshot, name: str, **labels: str) -> list[float]:
    found = [sample for sample in snapshot.samples() if sample.name == name]
    return [sample.value for sample in found if labels.items() <= sample.labels.items()]


def test_two_layers_with_ranks_at_100_and_200_have_a_balancedness_of_three_quarters() -> None:
    snapshot = _snapshot((100, 200), (100, 200))
    assert _values(snapshot, "moe_ep_balancedness_ratio", stage="train") == [0.75]
    assert _values(snapshot, "moe_ep_straggler_ratio", stage="train") == [pytest.approx(4 / 3)]


def test_a_replicated_expert_shares_its_load_between_its_slots() -> None:
    # expert 1 sits on both ranks: slots 0, 1 | 1, 2
    snapshot = _snapshot((10, 60, 10), placement=(0, 1, 1, 2))
    assert snapshot.rank_loads() == {mt.RouterKey("decoder", 0): (40.0, 40.0)}
    assert _values(snapshot, "moe_ep_balancedness_ratio") == [1.0]


def test_ranks_without_load_have_no_balancedness() -> None:
    assert _values(_snapshot((0, 0)), "moe_ep_balancedness_ratio") == []
    assert _snapshot((1, 1), num_ranks=None).rank_loads() == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_parallel_ranks": 3}, "8 experts on 3 ranks; expected equal blocks"),
        ({"expert_parallel_ranks": 0}, "expert_parallel_ranks=0: expected a whole number, 1 or more"),
        ({"expert_placement": (0, 1)}, "expert_placement needs expert_parallel_ranks"),
        ({"expert_parallel_ranks": 2, "expert_placement": (0, 1)}, "placement is for 2 experts; expected 8"),
        ({"expert_parallel_ranks": 2, "expert_placement": [0, 1]}, r"expert_placement=\[0, 1\]: expected a tuple"),
        ({"expert_parallel_ranks": 2, "expert_placement": (0, 2)}, "no rank holds expert 1"),
    ],
)
def test_experts_that_cannot_lie_as_stated_are_refused_before_the_first_step(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(mt.ConfigError, match=message):
        mt.watch(nn.Module(), routers={"decoder.0": 8}, **settings)


def test_a_placement_survives_json() -> None:
    snapshot = _snapshot((10, 60, 10), placement=(0, 1, 1, 2))
    assert mt.Snapshot.from_json(snapshot.to_json()) == snapshot


def test_the_histogram_adds_a_window_each_time_and_never_falls() -> None:
    name = "moe_expert_relative_load"
    with mt.watch(nn.Module(), routers={"decoder.0": 4}, every_n_steps=1) as monitor:
        monitor.observe(0, [[0], [1], [2], [3]])
        monitor.step(1)
        empty = monitor.step(2)
        monitor.observe(0, [[0], [0], [0], [1]])
        snapshot = monitor.step(3)
    assert empty is not None
    assert snapshot is not None
    found = [sample for sample in snapshot.samples() if sample.name == f"{name}_bucket"]
    buckets = {sample.labels["le"]: sample.value for sample in found}
    assert buckets["0.0"] == 2
    assert (buckets["0.75"], buckets["1.0"], buckets["2.0"], buckets["4.0"], buckets["+Inf"]) == (2, 7, 7, 8, 8)
    assert _values(empty, f"{name}_count") == [4]
    assert _values(snapshot, f"{name}_count") == _values(snapshot, f"{name}_sum") == [8]


def test_shares_of_the_hottest_experts_are_of_fewer_experts_than_there_are() -> None:
    shares = _values(_snapshot((5, 1, 1, 1, 0), num_ranks=None), "moe_load_hottest_share_ratio")
    assert shares == [0.625, 1.0]


def test_a_window_without_scores_has_no_score_gauge() -> None:
    names = {sample.name for sample in make_snapshot(window_steps=0).samples()}
    gauges = {metric.name for metric in (*SCORE_METRICS, *LOAD_SHAPE_METRICS) if metric.kind == "gauge"}
    assert not names & gauges
    assert "moe_score_nonfinite_tokens_total" in names


@pytest.mark.parametrize("metric", [*LOAD_SHAPE_METRICS, *SCORE_METRICS], ids=str)
def test_every_metric_says_how_it_is_computed_and_when_it_is_healthy(metric: mt.Metric) -> None:
    assert metric.formula.endswith(".")
    assert metric.healthy.endswith(".")

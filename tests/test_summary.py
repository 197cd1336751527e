"""JobSummary: the few numbers that people ask of a snapshot first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_telemetry import RouterKey, Sample, Snapshot
from moe_telemetry.records import Counts, LayerSnapshot
from moe_telemetry.summary import (
    Expert,
    HotExpert,
    JobSummary,
    Spread,
    is_of_layer,
    spread_over_layers,
    tokens_by_stage,
)
from moe_telemetry.testing import make_snapshot

FIRST, SECOND = RouterKey("decoder", 1), RouterKey("decoder", 2)


def _layer(window: tuple[int, ...], total: tuple[int, ...], stage: str = "train") -> LayerSnapshot:
    """A layer of top-1 routing, so that tokens are the sum of assignments."""
    counts = [Counts(tokens=sum(loads), assignments=loads) for loads in (window, total)]
    return LayerSnapshot(num_experts=len(total), window={stage: counts[0]}, total={stage: counts[1]}, share={})


@pytest.fixture
def snapshot() -> Snapshot:
    layers = {FIRST: _layer((0, 3, 3, 2), (1, 9, 9, 1)), SECOND: _layer((2, 2, 2, 2), (0, 10, 10, 0))}
    return replace(make_snapshot(num_layers=0), layers=layers)


def test_the_worst_layer_has_the_largest_maxvio_and_says_which_it_is(snapshot: Snapshot) -> None:
    worst = JobSummary.of(snapshot).worst_layer
    assert worst is not None
    assert (worst.router, worst.stats.max_violation) == (FIRST, 0.5)


def test_tokens_of_a_job_are_not_added_up_over_its_layers(snapshot: Snapshot) -> None:
    assert JobSummary.of(snapshot).tokens == 8
    assert JobSummary.of(snapshot, period="total").tokens == 20


def test_hottest_experts_are_named_with_their_share_of_their_own_router(snapshot: Snapshot) -> None:
    assert JobSummary.of(snapshot, period="total").hottest_experts(3) == [
        HotExpert(Expert(SECOND, 1), 0.5),
        HotExpert(Expert(SECOND, 2), 0.5),
        HotExpert(Expert(FIRST, 1), 0.45),
    ]


def test_equally_hot_experts_come_in_the_order_of_the_model() -> None:
    layers = {RouterKey("decoder", number): _layer((0, 8), (0, 8)) for number in (2, 10, 1)}
    hottest = JobSummary.of(replace(make_snapshot(num_layers=0), layers=layers)).hottest_experts(3)
    assert [str(hot.expert) for hot in hottest] == ["decoder.1/1", "decoder.2/1", "decoder.10/1"]


def test_dead_experts_are_named(snapshot: Snapshot) -> None:
    assert [str(expert) for expert in JobSummary.of(snapshot).dead_experts] == ["decoder.1/0"]
    assert JobSummary.of(snapshot, period="total").dead_experts == [Expert(SECOND, 0), Expert(SECOND, 3)]


def test_a_summary_of_nothing_has_no_worst_layer_and_no_experts() -> None:
    summary = JobSummary.of(make_snapshot(window_steps=0))
    assert (summary.stage, summary.tokens, summary.layers) == ("train", 0, ())
    assert summary.worst_layer is None
    assert summary.hottest_experts(3) == []
    assert summary.dead_experts == []


def test_training_is_summarised_unless_another_stage_is_named_or_alone() -> None:
    both = make_snapshot(num_layers=0)
    layer = LayerSnapshot(
        num_experts=2,
        window={},
        total={"eval": Counts(tokens=12, assignments=(12, 0)), "train": Counts(tokens=9, assignments=(5, 4))},
        share={},
    )
    both = replace(both, layers={FIRST: layer})
    assert tokens_by_stage(both, "total") == {"eval": 12, "train": 9}
    assert JobSummary.of(both, period="total").stage == "train"
    assert JobSummary.of(both, period="total", stage="eval").dead_experts == [Expert(FIRST, 1)]
    alone = replace(both, layers={FIRST: replace(layer, total={"rollout": layer.total["eval"]})})
    assert JobSummary.of(alone, period="total").stage == "rollout"


def _samples(*values: float) -> list[Sample]:
    labels = [{"stage": "train", "block": "decoder", "layer": str(layer)} for layer in range(len(values))]
    return [Sample("moe_load_cv_ratio", own, value) for own, value in zip(labels, values, strict=True)]


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([3.0], Spread(mean=3, max=3, min=3, p90=3)),
        ([float(value) for value in range(1, 11)], Spread(mean=5.5, max=10, min=1, p90=9)),
        ([4.0, 1.0, 2.0], Spread(mean=7 / 3, max=4, min=1, p90=4)),
    ],
)
def test_the_spread_of_a_metric_is_taken_over_its_layers(values: list[float], spread: Spread) -> None:
    assert spread_over_layers(_samples(*values)) == {("moe_load_cv_ratio", "train"): spread}


def test_numbers_about_experts_and_about_the_process_have_no_spread() -> None:
    samples = list(make_snapshot(per_expert=True).samples())
    names = {name for name, _ in spread_over_layers(samples)}
    assert "moe_load_cv_ratio" in names
    assert not names & {"moe_expert_assignments_total", "moe_telemetry_step"}
    assert not is_of_layer(Sample("a", {"layer": "1", "expert": "2"}, 0))

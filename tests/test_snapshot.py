"""Snapshot: what it yields to exporters, and that it survives JSON."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_telemetry import RouterKey, Snapshot, SnapshotError
from moe_telemetry.catalog import METRICS, metric_of
from moe_telemetry.records import Counts, Health, LayerSnapshot, Share
from moe_telemetry.testing import make_snapshot

count = st.integers(0, 2**62)
text = st.text(max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)


def counts_of(num_experts: int) -> st.SearchStrategy[Counts]:
    return st.builds(
        Counts,
        tokens=count,
        padding_tokens=count,
        assignments=st.tuples(*[count] * num_experts),
        dropped=count,
        invalid=count,
    )


@st.composite
def layers(draw: st.DrawFn) -> LayerSnapshot:
    num_experts = draw(st.integers(1, 5))
    by_stage = st.dictionaries(text, counts_of(num_experts), max_size=2)
    shares = st.builds(Share, tokens=count, padding_tokens=count, assignments=count, dropped=count, invalid=count)
    return LayerSnapshot(
        num_experts=num_experts,
        total=draw(by_stage),
        window=draw(by_stage),
        share=draw(st.dictionaries(text, shares, max_size=2)),
    )


keys = st.builds(RouterKey, st.text(min_size=1, max_size=8), st.integers(0, 99))
healths = st.builds(
    Health,
    routers_expected=count,
    routers_observed=count,
    run_finished=st.booleans(),
    overhead_seconds=finite,
    skipped_reductions=count,
    export_errors=st.dictionaries(text, count, max_size=2),
)
snapshots = st.builds(
    Snapshot,
    run=text,
    step=st.integers(-(2**40), 2**40),
    time=finite,
    world_size=count,
    layers=st.dictionaries(keys, layers(), max_size=3),
    health=healths,
    labels=st.dictionaries(text, text, max_size=2),
    leads=st.booleans(),
    per_expert=st.booleans(),
    max_series=count,
)


@given(snapshots)
def test_any_snapshot_survives_json(snapshot: Snapshot) -> None:
    line = snapshot.to_json()
    assert "\n" not in line
    restored = Snapshot.from_json(line)
    assert restored == snapshot
    assert list(restored.layers) == list(snapshot.layers)
    assert list(restored.samples("node")) == list(snapshot.samples("node"))


@pytest.mark.parametrize("broken", ["", "{", "[]", "3", "null", '{"run": "a"}', '"schema"', b"\xff\xfe{"])
def test_text_that_is_no_snapshot_is_refused(broken: str | bytes) -> None:
    with pytest.raises(SnapshotError, match="not a snapshot"):
        Snapshot.from_json(broken)


def test_another_schema_is_refused_by_its_number() -> None:
    values = {**json.loads(make_snapshot().to_json()), "schema": 99}
    with pytest.raises(SnapshotError, match="schema 99; this version reads 1"):
        Snapshot.from_json(json.dumps(values))


@pytest.mark.parametrize("change", [{"health": {}}, {"layers": 3}, {"layers": [{"router": "decoder"}]}, {"extra": 1}])
def test_a_damaged_snapshot_is_refused(change: dict[str, object]) -> None:
    values = {**json.loads(make_snapshot().to_json()), **change}
    with pytest.raises(SnapshotError, match="damaged"):
        Snapshot.from_json(json.dumps(values))


def test_a_snapshot_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        make_snapshot().step = 3  # type: ignore[misc]


def test_labels_handed_to_exporters_cannot_be_changed() -> None:
    sample = next(make_snapshot().samples())
    with pytest.raises(TypeError):
        sample.labels["layer"] = "7"  # type: ignore[index]


def test_samples_come_grouped_by_metric() -> None:
    samples = make_snapshot(per_expert=True, stages=("train", "eval")).samples()
    names = [metric_of(sample.name).name for sample in samples]
    runs = [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]
    assert len(runs) == len(set(runs))


def test_columns_hold_the_same_as_samples() -> None:
    snapshot = make_snapshot(per_expert=True)
    flattened = [
        (name, dict(own), value)
        for name, labels, values in snapshot.columns("node")
        for own, value in zip(labels, values, strict=True)
    ]
    assert flattened == [(name, dict(labels), value) for name, labels, value in snapshot.samples("node")]


def test_per_expert_series_are_off_unless_asked_for() -> None:
    assert "moe_expert_assignments_total" not in {sample.name for sample in make_snapshot().samples()}


@pytest.mark.parametrize("max_series", [0, 1, 40, 60, 10**6])
def test_only_per_expert_series_are_cut_at_the_limit(max_series: int) -> None:
    samples = list(make_snapshot(per_expert=True, max_series=max_series).samples())
    num_experts = sum(sample.name == "moe_expert_assignments_total" for sample in samples)
    (dropped,) = (sample.value for sample in samples if sample.name == "moe_telemetry_series_dropped_total")
    num_others = len(samples) - num_experts
    assert num_experts == min(24, max(0, max_series - num_others))
    assert num_experts + dropped == 24


def test_a_node_that_does_not_lead_cuts_nothing() -> None:
    samples = list(make_snapshot(per_expert=True, max_series=0, node=1, num_nodes=2).samples("node"))
    assert {sample.value for sample in samples if sample.name == "moe_telemetry_series_dropped_total"} == {0}


def test_a_router_that_placed_nothing_in_the_window_has_counters_but_no_ratios() -> None:
    names = {metric_of(sample.name).name for sample in make_snapshot(window_steps=0).samples()}
    assert "moe_router_tokens_total" in names
    assert not {name for name in names if METRICS[name].kind == "gauge" and "layer" in METRICS[name].labels}


def test_export_errors_are_a_series_an_exporter() -> None:
    snapshot = make_snapshot()
    health = replace(snapshot.health, export_errors={"console": 0, "jsonl": 2})
    samples = replace(snapshot, health=health).samples()
    errors = {dict(s.labels)["exporter"]: s.value for s in samples if s.name == "moe_telemetry_export_errors_total"}
    assert errors == {"console": 0, "jsonl": 2}

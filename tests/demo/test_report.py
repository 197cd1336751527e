"""The demo's summary, in words and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moe_telemetry import Counts, LayerSnapshot, RouterKey, Snapshot
from moe_telemetry.demo.options import DemoOptions
from moe_telemetry.demo.report import as_json, as_text
from moe_telemetry.testing import make_snapshot


def _snapshot(*assignments: tuple[int, ...]) -> Snapshot:
    layers = {
        RouterKey("decoder", index): LayerSnapshot(
            num_experts=len(counts),
            total={"train": Counts(tokens=sum(counts) // 4, assignments=counts)},
            window={},
            share={},
        )
        for index, counts in enumerate(assignments, start=1)
    }
    return replace(make_snapshot(), layers=layers)


def test_text_names_the_hottest_expert_and_the_even_share() -> None:
    text = as_text(_snapshot((4, 4, 4, 4), (2, 0, 12, 2)), DemoOptions())
    assert "hottest experts  decoder.2/2    75.0%  of its layer; an even share is 25.0%" in text


def test_text_names_dead_experts_by_layer() -> None:
    text = as_text(_snapshot((8, 0, 8, 0), (4, 4, 4, 4)), DemoOptions())
    assert "  dead experts     decoder.1: 1, 3\n" in text


def test_text_says_of_how_many_experts_none_is_dead() -> None:
    assert "  dead experts     none of 8\n" in as_text(_snapshot((4, 4, 4, 4), (4, 4, 4, 4)), DemoOptions())


def test_text_explains_the_least_balanced_layer() -> None:
    text = as_text(_snapshot((4, 4, 4, 4), (2, 0, 12, 2)), DemoOptions())
    assert "decoder.2, MaxVio 2.00 (hottest expert: 3.0 x the mean)" in text


def test_text_of_a_run_without_tokens_has_no_experts() -> None:
    text = as_text(replace(make_snapshot(), layers={}), DemoOptions())
    assert "hottest" not in text
    assert "Where to look next" in text


def test_text_tells_of_exports_that_failed() -> None:
    snapshot = make_snapshot()
    health = replace(snapshot.health, export_errors={"prometheus": 3, "console": 0})
    assert "failed exports   prometheus: 3\n" in as_text(replace(snapshot, health=health), DemoOptions())


@pytest.mark.parametrize("num_experts", [16, 256])
def test_text_fits_80_columns(num_experts: int) -> None:
    nearly_all_dead = (1_000_000,) + (0,) * (num_experts - 1)
    text = as_text(_snapshot(nearly_all_dead, nearly_all_dead), DemoOptions(port=65535))
    assert max(map(len, text.splitlines())) <= 80


def test_json_has_the_figures_of_the_text() -> None:
    summary = json.loads(json.dumps(as_json(_snapshot((8, 0, 8, 0), (2, 0, 12, 2)))))
    assert summary["tokens"] == {"train": 4}
    assert summary["hottest_experts"][0] == {"router": "decoder.2", "expert": 2, "share": 0.75}
    assert summary["dead_experts"] == ["decoder.1/1", "decoder.1/3", "decoder.2/1"]
    assert summary["layers"]["decoder.2"]["max_violation"] == 2.0

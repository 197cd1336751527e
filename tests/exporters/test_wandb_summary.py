"""The summary of a W&B run: how it ended, and the worst that was seen."""

from __future__ import annotations

import pytest

from moe_telemetry.summary import JobSummary
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.wandb.summary import WORST, RunSummary
from tests.exporters.snapshots import misaligned


def test_the_load_is_that_of_the_window() -> None:
    snapshot = make_snapshot(step=30, num_layers=5, num_experts=64, tokens_per_step=64)
    found = RunSummary({}).of(snapshot)
    expected = JobSummary.of(snapshot)
    assert expected.worst_layer is not None
    assert found["moe/summary/dead_experts"] == len(expected.dead_experts) > 0
    assert found["moe/summary/highest_max_violation"] == expected.worst_layer.stats.max_violation
    assert found["moe/summary/worst_layer"] == str(expected.worst_layer.router)
    assert found["moe/summary/hottest_expert"] == str(expected.hottest_experts(1)[0].expert)
    assert found["moe/summary/tokens"] == 30 * 64


def test_agreement_weighs_all_checked_rows_alike() -> None:
    found = RunSummary({}).of(misaligned(make_snapshot(num_layers=2, replayed=True, top_k=2), layers={0}))
    # 1,000 rows that share 0.4 of their experts; of 2,520 rows, 30 differ in one of two
    assert found["moe/summary/replay_agreement"] == pytest.approx((400 + 2505) / 3520, abs=1e-3)
    assert found["moe/summary/lowest_replay_agreement"] == 0.4
    assert found["moe/summary/highest_replay_zero_overlap"] == 0.5


def test_the_worst_stays_and_the_rest_follows_the_last_window() -> None:
    summary = RunSummary({})
    summary.of(misaligned(make_snapshot()))
    found = summary.of(make_snapshot(step=20, replayed=True))
    assert found["moe/summary/highest_replay_zero_overlap"] == 0.5
    assert found["moe/summary/lowest_replay_agreement"] == 0.4
    assert found["moe/summary/replay_agreement"] > 0.99


def test_a_window_in_which_nothing_was_counted_says_nothing_new() -> None:
    assert RunSummary({}).of(make_snapshot(window_steps=0)) == {}


def test_a_resumed_run_goes_on_from_what_it_has() -> None:
    known = {"moe/summary/highest_max_violation": 99, "moe/summary/lowest_load_entropy": 0.01, "other": "text"}
    found = RunSummary(known).of(make_snapshot())
    assert found["moe/summary/highest_max_violation"] == 99
    assert found["moe/summary/lowest_load_entropy"] == 0.01


def test_without_a_replay_there_are_no_numbers_about_one() -> None:
    assert not [key for key in RunSummary({}).of(make_snapshot()) if "replay" in key]
    assert set(RunSummary({}).of(make_snapshot(replayed=True))) > set(WORST)

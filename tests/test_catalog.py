"""METRICS is a contract: names and labels are frozen here, as literals."""

from __future__ import annotations

import re

import pytest

from moe_telemetry.catalog import METRICS, Metric, metric_of
from moe_telemetry.testing import make_snapshot

LAYER = ("block", "layer")
ROUTER = ("stage", *LAYER)

# Adding a name is a feature and goes below; changing or removing one, or its labels, breaks dashboards and alerts.
FROZEN = {
    "moe_balance_loss_ratio": LAYER,
    "moe_bias_overlap_ratio": LAYER,
    "moe_ep_balancedness_ratio": ("stage",),
    "moe_ep_straggler_ratio": ("stage",),
    "moe_expert_assignments_total": (*ROUTER, "expert"),
    "moe_expert_bias_max": LAYER,
    "moe_expert_bias_min": LAYER,
    "moe_expert_relative_load": ROUTER,
    "moe_load_cv_ratio": ROUTER,
    "moe_load_dead_experts": ROUTER,
    "moe_load_entropy_ratio": ROUTER,
    "moe_load_gini_ratio": ROUTER,
    "moe_load_hottest_share_ratio": (*ROUTER, "experts"),
    "moe_load_max_violation_ratio": ROUTER,
    "moe_load_microbatch_max_violation_ratio": ROUTER,
    "moe_load_min_violation_ratio": ROUTER,
    "moe_logit_max": LAYER,
    "moe_replay_agreement_ratio": LAYER,
    "moe_replay_check_blind": LAYER,
    "moe_replay_corrected_agreement_ratio": LAYER,
    "moe_replay_coverage_ratio": LAYER,
    "moe_replay_longest_equal_run_tokens": LAYER,
    "moe_replay_misalignment_info": ("cause", "offset"),
    "moe_replay_shared_fraction_total": LAYER,
    "moe_replay_tie_tolerant_agreement_ratio": LAYER,
    "moe_replay_tokens_total": (*LAYER, "outcome"),
    "moe_replay_zero_overlap_ratio": LAYER,
    "moe_replay_zero_overlap_tokens_total": LAYER,
    "moe_router_assignments_total": ROUTER,
    "moe_router_dropped_assignments_total": ROUTER,
    "moe_router_invalid_assignments_total": ROUTER,
    "moe_router_padding_tokens_total": ROUTER,
    "moe_router_tokens_total": ROUTER,
    "moe_router_z": LAYER,
    "moe_score_entropy_ratio": LAYER,
    "moe_score_nonfinite_tokens_total": ROUTER,
    "moe_selected_mass_ratio": LAYER,
    "moe_telemetry_build_info": ("version",),
    "moe_telemetry_export_errors_total": ("exporter",),
    "moe_telemetry_last_step_timestamp_seconds": (),
    "moe_telemetry_overhead_seconds_total": (),
    "moe_telemetry_routers_expected": (),
    "moe_telemetry_routers_observed": (),
    "moe_telemetry_run_finished": (),
    "moe_telemetry_series_dropped_total": (),
    "moe_telemetry_skipped_reductions_total": (),
    "moe_telemetry_step": (),
    "moe_topk_boundary_margin_ratio": LAYER,
}

each_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=str)


def test_names_and_labels_are_frozen() -> None:
    assert {name: metric.labels for name, metric in METRICS.items()} == FROZEN


@each_metric
def test_a_metric_is_found_under_its_own_name(metric: Metric) -> None:
    assert METRICS[metric.name] is metric


@each_metric
def test_counters_and_only_counters_end_in_total(metric: Metric) -> None:
    assert (metric.kind == "counter") == metric.name.endswith("_total")


@each_metric
def test_names_say_what_they_are_of_and_in_which_unit(metric: Metric) -> None:
    assert re.fullmatch(r"moe_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.removesuffix("_total").endswith("_seconds") == (metric.unit == "s")
    if metric.name.endswith("_ratio"):
        assert metric.unit == "1"


@each_metric
def test_help_is_a_sentence(metric: Metric) -> None:
    assert re.fullmatch(r"[A-Z0-9].+\.", metric.help)


@each_metric
def test_the_opentelemetry_name_has_dots_and_no_total(metric: Metric) -> None:
    assert metric.otel_name.split(".") == metric.name.removesuffix("_total").split("_")


def test_one_word_stands_for_one_idea() -> None:
    labels = {label for metric in METRICS.values() for label in metric.labels}
    assert labels == {
        "stage",
        "block",
        "layer",
        "expert",
        "exporter",
        "version",
        "outcome",
        "cause",
        "offset",
        "experts",
    }


def test_samples_have_the_names_and_labels_of_the_table() -> None:
    snapshot = make_snapshot(per_expert=True, replayed=True, expert_parallel_ranks=2)
    samples = list(snapshot.samples())
    assert {metric_of(sample.name).name for sample in samples} == set(METRICS) - {
        "moe_replay_misalignment_info",
        "moe_telemetry_export_errors_total",
    }
    for sample in samples:
        bound = ("le",) if sample.name.endswith("_bucket") else ()
        assert tuple(sample.labels) == (*metric_of(sample.name).labels, *bound)


@pytest.mark.parametrize("num_experts", [16, 256])
def test_the_default_export_stays_below_40_series_a_layer(num_experts: int) -> None:
    few, many = (make_snapshot(num_layers=number, num_experts=num_experts) for number in (1, 62))
    assert len(list(many.samples())) - len(list(few.samples())) < 61 * 40

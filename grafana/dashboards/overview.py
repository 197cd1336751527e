"""The first look: is the run healthy, which layer is worst, does replay agree, is telemetry alive."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from grafana.dashboards.panels import Panel, alert_list, lines, number
from grafana.dashboards.queries import Query, gauge, of_router, rate, select, worst_router
from grafana.dashboards.recorded import compared_runs
from grafana.dashboards.routers import by_router, load_shape
from grafana.dashboards.shell import dashboard
from grafana.dashboards.tables import Column, router_table

__all__ = ["overview"]

_STAMP = "moe_telemetry_last_step_timestamp_seconds"
_FINISHED = "moe_telemetry_run_finished"

_LAYERS = (
    Column(
        "MaxVio",
        "moe_load_max_violation_ratio",
        of_router("moe_load_max_violation_ratio"),
        "MoeLoadImbalanced",
    ),
    Column("Dead experts", "moe_load_dead_experts", of_router("moe_load_dead_experts"), "MoeExpertsDead"),
    Column("Load entropy", "moe_load_entropy_ratio", of_router("moe_load_entropy_ratio", pick="min")),
    Column(
        "Score entropy",
        "moe_score_entropy_ratio",
        of_router("moe_score_entropy_ratio", pick="min"),
        "MoeRouterEntropyCollapsed",
    ),
    Column(
        "Agreement",
        "moe_replay_agreement_ratio",
        of_router("moe_replay_agreement_ratio", pick="min"),
        "MoeReplayAgreementLow",
    ),
    Column(
        "Zero overlap",
        "moe_replay_zero_overlap_ratio",
        of_router("moe_replay_zero_overlap_ratio"),
        "MoeReplayZeroOverlapHigh",
    ),
)


def overview() -> Dashboard:
    """Return the dashboard."""
    built = dashboard("moe-overview", "MoE routers: overview", stage=True, router=True)
    for panel in (*_health(), *_replay(), *_now(), *_over_time()):
        built = built.with_panel(panel)
    row = Row("Runs side by side (needs the recording rules)").collapsed(True)
    for panel in compared_runs():
        row = row.with_panel(panel)
    return built.with_row(row)


def _health() -> list[object]:
    age = f"time() - max({select(_STAMP)}) unless min({select(_FINISHED)}) == 1"
    missing = f"{gauge('moe_telemetry_routers_expected')} - {gauge('moe_telemetry_routers_observed')}"
    dead = f"sum({gauge('moe_load_dead_experts', 'block', 'layer')})"
    return [
        number(
            Panel(
                "Last export",
                _STAMP,
                Query(expr=age, legend="age", instant=True),
                alert="MoeTelemetryStalled",
                unit="s",
                note="How long ago the run exported last; empty once it is finished.",
                width=3,
                height=4,
                no_value="finished",
            )
        ),
        number(
            Panel(
                "Silent routers",
                "moe_telemetry_routers_observed",
                Query(expr=missing, legend="silent routers", instant=True),
                alert="MoeTelemetryRoutersMissing",
                note="Routers that the job attached to and that have counted nothing.",
                width=3,
                height=4,
            )
        ),
        number(
            Panel(
                "Dead experts",
                "moe_load_dead_experts",
                Query(expr=dead, legend="dead experts", instant=True),
                alert="MoeExpertsDead",
                note="Over all layers.",
                width=3,
                height=4,
            )
        ),
        number(
            Panel(
                "Worst MaxVio",
                "moe_load_max_violation_ratio",
                worst_router("moe_load_max_violation_ratio"),
                alert="MoeLoadImbalanced",
                note="The layer with the largest MaxVio.",
                width=3,
                height=4,
            ),
            named=True,
        ),
    ]


def _replay() -> list[object]:
    tokens = rate("moe_router_tokens_total", "block", "layer")
    return [
        number(
            Panel(
                "Lowest agreement",
                "moe_replay_agreement_ratio",
                worst_router("moe_replay_agreement_ratio", pick="min"),
                alert="MoeReplayAgreementLow",
                note="The layer with the lowest agreement.",
                width=3,
                height=4,
                no_value="no replay",
            ),
            named=True,
        ),
        number(
            Panel(
                "Highest zero overlap",
                "moe_replay_zero_overlap_ratio",
                worst_router("moe_replay_zero_overlap_ratio"),
                alert="MoeReplayZeroOverlapHigh",
                note="The layer with the largest share.",
                width=3,
                height=4,
                no_value="no replay",
            ),
            named=True,
        ),
        number(
            Panel(
                "Tokens per second",
                "moe_router_tokens_total",
                Query(expr=f"max({tokens})", legend="tokens/s"),
                note="Of the layer that sees most: each layer sees every token once.",
                width=3,
                height=4,
            )
        ),
        number(
            Panel(
                "Step",
                "moe_telemetry_step",
                Query(expr=gauge("moe_telemetry_step"), legend="step", instant=True),
                width=3,
                height=4,
            )
        ),
    ]


def _now() -> list[object]:
    queries = tuple(Query(expr=column.query.expr, legend="", instant=True) for column in _LAYERS)
    rows = Panel(
        "Layers now, the worst first",
        "moe_load_max_violation_ratio",
        queries,
        note="A row for each router; its layer leads to the layer dashboard. Sort by any column.",
        width=16,
        height=9,
    )
    return [alert_list(width=8, height=9), router_table(rows, _LAYERS)]


def _over_time() -> list[object]:
    tokens = rate("moe_router_tokens_total", "stage", "block", "layer", any_stage=True)
    return [
        by_router("MaxVio by layer", "moe_load_max_violation_ratio", alert="MoeLoadImbalanced"),
        by_router("Dead experts by layer", "moe_load_dead_experts", alert="MoeExpertsDead"),
        by_router("Replay agreement by layer", "moe_replay_agreement_ratio", pick="min", alert="MoeReplayAgreementLow"),
        by_router("Zero overlap by layer", "moe_replay_zero_overlap_ratio", alert="MoeReplayZeroOverlapHigh"),
        load_shape(),
        lines(
            Panel(
                "Tokens per second by stage",
                "moe_router_tokens_total",
                Query(expr=f"max by (stage) ({tokens})", legend="{{stage}}"),
                note="Of the layer that sees most, in every stage.",
            )
        ),
    ]

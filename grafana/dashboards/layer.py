"""Every number of the chosen layers: load, choices, scores, and single experts where they are exported."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.builders.dashboard import Panel as AnyPanel

from grafana.dashboards.panels import Panel, bars, lines
from grafana.dashboards.queries import BY_ROUTER, ROUTER, Query, gauge, over, rate
from grafana.dashboards.routers import by_router, cells, load_shape, router_rate, share_of_assignments
from grafana.dashboards.shell import dashboard

__all__ = ["layer"]

_EXPERTS = "moe_expert_assignments_total"


def layer() -> Dashboard:
    """Return the dashboard."""
    built = dashboard("moe-layer", "MoE routers: layers", stage=True, router=True)
    for title, panels in (("Load", _load()), ("Tokens and choices", _choices()), ("Scores", _scores())):
        built = built.with_row(Row(title))
        for panel in panels:
            built = built.with_panel(panel)
    row = Row("Single experts (needs per_expert=True)").collapsed(True)
    for panel in _experts():
        row = row.with_panel(panel)
    return built.with_row(row)


def _load() -> list[AnyPanel]:
    hottest = Query(
        expr=gauge("moe_load_hottest_share_ratio", *ROUTER, "experts"),
        legend="{{block}}.{{layer}}: {{experts}} hottest",
    )
    return [
        cells("MaxVio, layers by time", "moe_load_max_violation_ratio", alert="MoeLoadImbalanced"),
        by_router("MaxVio", "moe_load_max_violation_ratio", alert="MoeLoadImbalanced"),
        by_router("MaxVio of single microbatches", "moe_load_microbatch_max_violation_ratio"),
        by_router("Dead experts", "moe_load_dead_experts", alert="MoeExpertsDead"),
        by_router("MinVio", "moe_load_min_violation_ratio", pick="min"),
        load_shape(),
        by_router("Entropy of the load", "moe_load_entropy_ratio", pick="min"),
        by_router("Coefficient of variation", "moe_load_cv_ratio"),
        by_router("Gini coefficient", "moe_load_gini_ratio"),
        lines(Panel("Share of the hottest experts", "moe_load_hottest_share_ratio", hottest, width=24)),
    ]


def _choices() -> list[AnyPanel]:
    padding = rate("moe_router_padding_tokens_total", *ROUTER)
    everything = f"({rate('moe_router_tokens_total', *ROUTER)} + {padding})"
    share = Query(expr=over(padding, everything), legend=BY_ROUTER)
    return [
        router_rate("Tokens per second", "moe_router_tokens_total"),
        lines(
            Panel(
                "Padding",
                "moe_router_padding_tokens_total",
                share,
                unit="percentunit",
                note="As a share of all tokens that reach the router.",
            )
        ),
        share_of_assignments("Dropped choices", "moe_router_dropped_assignments_total"),
        router_rate("Invalid choices per second", "moe_router_invalid_assignments_total"),
    ]


def _scores() -> list[AnyPanel]:
    return [
        by_router("Entropy of the scores", "moe_score_entropy_ratio", pick="min", alert="MoeRouterEntropyCollapsed"),
        by_router("Margin at the top-k boundary", "moe_topk_boundary_margin_ratio", pick="min"),
        by_router("Probability of the chosen experts", "moe_selected_mass_ratio", pick="min"),
        by_router("Load-balancing loss", "moe_balance_loss_ratio"),
        by_router("Largest logit", "moe_logit_max"),
        by_router("Router z", "moe_router_z"),
        by_router("Choices that scores alone would make", "moe_bias_overlap_ratio", pick="min"),
        router_rate("Tokens with a NaN or an infinity per second", "moe_score_nonfinite_tokens_total"),
        by_router("Largest expert bias", "moe_expert_bias_max"),
        by_router("Smallest expert bias", "moe_expert_bias_min", pick="min"),
    ]


def _experts() -> list[AnyPanel]:
    each = rate(_EXPERTS, *ROUTER, "expert")
    relative = f"{each} / on (block, layer) group_left () (avg by (block, layer) ({each}) > 0)"
    legend = "{{block}}.{{layer}}, expert {{expert}}"
    note = "Load over the mean load of the layer's experts: 1 is balanced."
    return [
        bars(
            Panel(
                "Hottest experts",
                _EXPERTS,
                Query(expr=f"topk(20, {relative})", legend=legend, instant=True),
                unit="none",
                note=note,
            )
        ),
        bars(
            Panel(
                "Coldest experts",
                _EXPERTS,
                Query(expr=f"bottomk(20, {relative})", legend=legend, instant=True),
                unit="none",
                note=note,
            )
        ),
        lines(
            Panel(
                "Experts that are far above the mean",
                _EXPERTS,
                Query(expr=f"topk(10, {relative}) > 1", legend=legend),
                unit="none",
                note=f"{note} The ten hottest at each time.",
                width=24,
            )
        ),
    ]

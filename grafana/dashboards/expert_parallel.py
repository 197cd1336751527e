"""What an uneven load costs where experts lie on several ranks: stragglers, hot experts, dropped choices."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.dashboard import Panel as AnyPanel

from grafana.dashboards.panels import Panel, lines, number
from grafana.dashboards.queries import ROUTER, Query, gauge, rate, worst_router
from grafana.dashboards.routers import by_router, share_of_assignments
from grafana.dashboards.shell import dashboard

__all__ = ["expert_parallel"]

_BALANCE, _STRAGGLER = "moe_ep_balancedness_ratio", "moe_ep_straggler_ratio"
_HOTTEST, _TOKENS = "moe_load_hottest_share_ratio", "moe_router_tokens_total"
_UNSET = "needs expert_parallel_ranks"


def expert_parallel() -> Dashboard:
    """Return the dashboard."""
    built = dashboard("moe-expert-parallel", "MoE routers: expert parallelism", stage=True, router=True)
    for panel in (*_now(), *_over_time()):
        built = built.with_panel(panel)
    return built


def _now() -> list[AnyPanel]:
    hottest = f"topk(1, {gauge(_HOTTEST, *ROUTER, experts='1')})"
    share = Query(expr=hottest, legend="{{block}}.{{layer}}", instant=True)
    worst = worst_router("moe_load_max_violation_ratio")
    return [
        number(Panel("Balancedness of ranks", _BALANCE, _now_of(_BALANCE), width=6, height=4, no_value=_UNSET)),
        number(Panel("Straggler factor", _STRAGGLER, _now_of(_STRAGGLER), width=6, height=4, no_value=_UNSET)),
        number(
            Panel(
                "Worst MaxVio",
                "moe_load_max_violation_ratio",
                worst,
                alert="MoeLoadImbalanced",
                note="The worst layer.",
                width=6,
                height=4,
            ),
            named=True,
        ),
        number(
            Panel("Largest share of one expert", _HOTTEST, share, note="The worst layer.", width=6, height=4),
            named=True,
        ),
    ]


def _now_of(metric: str) -> Query:
    return Query(expr=gauge(metric), legend=metric, instant=True)


def _over_time() -> list[AnyPanel]:
    nodes = Query(expr=f"max by (instance) ({rate(_TOKENS, 'instance', *ROUTER)})", legend="{{instance}}")
    return [
        lines(Panel("Balancedness of ranks over time", _BALANCE, _of_stage(_BALANCE), no_value=_UNSET)),
        lines(Panel("Straggler factor over time", _STRAGGLER, _of_stage(_STRAGGLER), no_value=_UNSET)),
        by_router("MaxVio by layer", "moe_load_max_violation_ratio", alert="MoeLoadImbalanced"),
        by_router(
            "MaxVio of single microbatches by layer",
            "moe_load_microbatch_max_violation_ratio",
            note="What ranks wait for in each call, even where the window is balanced.",
        ),
        share_of_assignments("Dropped choices by layer", "moe_router_dropped_assignments_total"),
        lines(
            Panel(
                "Tokens per second by endpoint",
                _TOKENS,
                nodes,
                note="Of each node's own ranks: nodes that see fewer tokens wait for the others.",
            )
        ),
    ]


def _of_stage(metric: str) -> Query:
    return Query(expr=gauge(metric, "stage"), legend="{{stage}}")

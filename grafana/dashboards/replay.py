"""Do replayed routes belong to their tokens: agreement, zero overlap, coverage, and the cause that was found."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.builders.dashboard import Panel as AnyPanel

from grafana.dashboards.panels import Panel, lines, number, stacked
from grafana.dashboards.queries import BY_ROUTER, ROUTER, Query, gauge, over, rate, worst_router
from grafana.dashboards.routers import by_router, cells
from grafana.dashboards.shell import dashboard
from grafana.dashboards.tables import label_table

__all__ = ["replay"]

_TOKENS, _CHECKED = "moe_replay_tokens_total", "checked"


def replay() -> Dashboard:
    """Return the dashboard."""
    built = dashboard("moe-replay", "MoE routers: replay", stage=False, router=True)
    for panel in _verdict():
        built = built.with_panel(panel)
    for title, panels in (("Agreement", _agreement()), ("What could be checked", _coverage())):
        built = built.with_row(Row(title))
        for panel in panels:
            built = built.with_panel(panel)
    return built


def _verdict() -> list[AnyPanel]:
    whole = over(rate("moe_replay_shared_fraction_total"), rate(_TOKENS, outcome=_CHECKED))
    found = Query(expr=gauge("moe_replay_misalignment_info", "cause", "offset"), legend="{{cause}}", instant=True)
    cause = Panel("Last cause found", "moe_replay_misalignment_info", found, width=6, height=4, no_value="none")
    return [
        _number("Agreement, all layers", "moe_replay_agreement_ratio", whole, "MoeReplayAgreementLow"),
        _worst("Lowest agreement", "moe_replay_agreement_ratio", "min", "MoeReplayAgreementLow"),
        _worst("Highest zero overlap", "moe_replay_zero_overlap_ratio", "max", "MoeReplayZeroOverlapHigh"),
        _worst("Lowest coverage", "moe_replay_coverage_ratio", "min", "MoeReplayCoverageLow"),
        _number(
            "Blind layers",
            "moe_replay_check_blind",
            f"sum({gauge('moe_replay_check_blind', *ROUTER)})",
            "MoeReplayCheckBlind",
        ),
        _number("Tokens checked per second", _TOKENS, f"max({rate(_TOKENS, *ROUTER, outcome=_CHECKED)})", None),
        label_table(cause, columns={"cause": "Cause", "offset": "Offset"}),
    ]


def _number(title: str, metric: str, expr: str, alert: str | None) -> AnyPanel:
    query = Query(expr=expr, legend=title.lower())
    return number(Panel(title, metric, query, alert=alert, width=3, height=4, no_value="no replay"))


def _worst(title: str, metric: str, pick: str, alert: str) -> AnyPanel:
    query = worst_router(metric, pick=pick)
    panel = Panel(title, metric, query, alert=alert, note="The worst layer.", width=3, height=4, no_value="no replay")
    return number(panel, named=True)


def _agreement() -> list[AnyPanel]:
    counted = over(rate("moe_replay_zero_overlap_tokens_total", *ROUTER), rate(_TOKENS, *ROUTER, outcome=_CHECKED))
    return [
        cells("Agreement, layers by time", "moe_replay_agreement_ratio", alert="MoeReplayAgreementLow"),
        by_router("Agreement", "moe_replay_agreement_ratio", pick="min", alert="MoeReplayAgreementLow"),
        by_router(
            "Agreement, ties counted as shared",
            "moe_replay_tie_tolerant_agreement_ratio",
            pick="min",
            note="What is lost between this and the agreement is rounding.",
        ),
        by_router("Agreement corrected for chance", "moe_replay_corrected_agreement_ratio", pick="min"),
        by_router("Longest run of equal routes", "moe_replay_longest_equal_run_tokens"),
        by_router("Zero overlap on the worst rank", "moe_replay_zero_overlap_ratio", alert="MoeReplayZeroOverlapHigh"),
        lines(
            Panel(
                "Zero overlap over all ranks",
                "moe_replay_zero_overlap_tokens_total",
                Query(expr=counted, legend=BY_ROUTER),
                alert="MoeReplayZeroOverlapHigh",
                unit="percentunit",
                note="Of the counters, which the alert goes by, as a share of the checked tokens.",
            )
        ),
    ]


def _coverage() -> list[AnyPanel]:
    outcomes = Query(expr=rate(_TOKENS, "outcome"), legend="{{outcome}}")
    note = "Per second, over all layers: every replayed token is in exactly one of these."
    return [
        by_router("Share that could be checked", "moe_replay_coverage_ratio", pick="min", alert="MoeReplayCoverageLow"),
        stacked(Panel("Replayed tokens by outcome", _TOKENS, outcomes, note=note)),
    ]

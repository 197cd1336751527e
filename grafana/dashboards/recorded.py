"""Runs side by side: panels over the series of `rules/moe-recording.yaml`, one a run, kept when raw series are not."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Panel as AnyPanel

from grafana.dashboards.panels import Panel, lines
from grafana.dashboards.queries import Query

__all__ = ["compared_runs"]

_NOTE = "All runs of the job, by series that the recording rules keep; empty where they are not loaded."


def compared_runs() -> list[AnyPanel]:
    """Return the panels."""
    return [
        _compared("MaxVio, worst layer", "moe_load_max_violation_ratio", "max", "MoeLoadImbalanced"),
        _compared("Dead experts, all layers", "moe_load_dead_experts", "sum", "MoeExpertsDead"),
        _compared("Score entropy, lowest layer", "moe_score_entropy_ratio", "min", "MoeRouterEntropyCollapsed"),
        _compared("Replay agreement, lowest layer", "moe_replay_agreement_ratio", "min", "MoeReplayAgreementLow"),
        _compared("Zero overlap, worst layer", "moe_replay_zero_overlap_ratio", "max", "MoeReplayZeroOverlapHigh"),
        _compared("Tokens per second in training", "moe_router_tokens_total", "rate5m", None),
    ]


def _compared(title: str, metric: str, operation: str, alert: str | None) -> AnyPanel:
    series = f"job_run:{metric.removesuffix('_total')}:{operation}"
    query = Query(expr=f'{series}{{job=~"$job"}}', legend="{{run}}")
    worst = "min" if operation == "min" else "max"
    return lines(Panel(title, metric, query, alert=alert, note=_NOTE, width=8, worst=worst))

"""Panels that several dashboards have: a line or a row of cells for each router, and the shape of the load."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Panel as AnyPanel

from grafana.dashboards.panels import Panel, buckets, lines, states
from grafana.dashboards.queries import BY_ROUTER, ROUTER, Query, of_router, over, rate, select, sortable

__all__ = ["by_router", "cells", "load_shape", "router_rate", "share_of_assignments"]


def by_router(title: str, metric: str, *, pick: str = "max", alert: str | None = None, note: str = "") -> AnyPanel:
    """Return a gauge of every router over time."""
    return lines(Panel(title, metric, of_router(metric, pick=pick), alert=alert, note=note, worst=pick))


def cells(title: str, metric: str, *, alert: str) -> AnyPanel:
    """Return a gauge as layers x time: which layers were beyond the limit, and when."""
    note = "A row for each router in the order of the model, red beyond the limit of the alert."
    return states(Panel(title, metric, sortable(metric), alert=alert, note=note, width=24, height=10))


def router_rate(title: str, metric: str, *, note: str = "") -> AnyPanel:
    """Return what a counter of every router grows by in a second."""
    query = Query(expr=rate(metric, *ROUTER), legend=BY_ROUTER)
    return lines(Panel(title, metric, query, note=note or "Per second, over all endpoints."))


def share_of_assignments(title: str, metric: str) -> AnyPanel:
    """Return a counter of assignments as a share of all assignments of its router."""
    chosen = f"({rate('moe_router_assignments_total', *ROUTER)} + {rate(metric, *ROUTER)})"
    query = Query(expr=over(rate(metric, *ROUTER), chosen), legend=BY_ROUTER)
    return lines(Panel(title, metric, query, unit="percentunit", note="As a share of all choices."))


def load_shape() -> AnyPanel:
    """Return the histogram of the experts' loads over time, of all routers that are chosen."""
    counted = f"increase({select('moe_expert_relative_load_bucket')}[$__rate_interval])"
    query = Query(expr=f"sum by (le) ({counted})", legend="{{le}}")
    note = "Each column is the distribution of all experts; a full row at 0 is dead experts, a tail above 2 hot ones."
    return buckets(Panel("Load of the experts", "moe_expert_relative_load", query, note=note))

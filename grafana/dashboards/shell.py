"""What all dashboards have: identity, variables, time range, links to each other."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DashboardLinkType

from grafana.dashboards.variables import variables

__all__ = ["dashboard"]

_TAG = "moe-telemetry"


def dashboard(uid: str, title: str, *, stage: bool, router: bool, instance: bool = False) -> Dashboard:
    """Return a dashboard without panels; `stage`, `router` and `instance` are its variables."""
    others = DashboardLink("MoE dashboards").type(DashboardLinkType.DASHBOARDS).tags([_TAG])
    built = (
        Dashboard(title)
        .uid(uid)
        .description("Written by scripts/generate_grafana.py of moe-telemetry; edit a copy, not this one.")
        .tags([_TAG])
        .readonly()
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(others.as_dropdown(False).include_vars(True).keep_time(True))
    )
    for variable in variables(stage=stage, router=router, instance=instance):
        built = built.with_variable(variable)
    return built

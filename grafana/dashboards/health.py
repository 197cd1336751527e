"""Is telemetry itself well: exports, routers, exporters, what it costs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.dashboard import Panel as AnyPanel

from grafana.dashboards.panels import Panel, lines, number
from grafana.dashboards.queries import Query, gauge, rate, select
from grafana.dashboards.shell import dashboard
from grafana.dashboards.tables import label_table

__all__ = ["health"]

_STAMP, _FINISHED = "moe_telemetry_last_step_timestamp_seconds", "moe_telemetry_run_finished"
_EXPECTED, _OBSERVED = "moe_telemetry_routers_expected", "moe_telemetry_routers_observed"
_ERRORS, _DROPPED = "moe_telemetry_export_errors_total", "moe_telemetry_series_dropped_total"
_OVERHEAD, _SKIPPED = "moe_telemetry_overhead_seconds_total", "moe_telemetry_skipped_reductions_total"
_BY_ENDPOINT = "{{instance}}"


def health() -> Dashboard:
    """Return the dashboard."""
    built = dashboard("moe-telemetry-health", "MoE routers: telemetry", stage=False, router=False, instance=True)
    for panel in (*_numbers(), *_exports(), *_costs(), *_tables()):
        built = built.with_panel(panel)
    return built


def _numbers() -> list[AnyPanel]:
    age = f"time() - min({select(_STAMP)}) unless min({select(_FINISHED)}) == 1"
    return [
        _number(
            Panel(
                "Oldest last export",
                _STAMP,
                Query(expr=age, legend="age", instant=True),
                alert="MoeTelemetryStalled",
                note="Of the endpoint that exported longest ago; empty once the run is finished.",
                no_value="finished",
                width=6,
                height=4,
            )
        ),
        _number(
            Panel(
                "Silent routers",
                _OBSERVED,
                Query(expr=f"{gauge(_EXPECTED)} - {gauge(_OBSERVED)}", legend="silent routers", instant=True),
                alert="MoeTelemetryRoutersMissing",
                note="Routers that the job attached to and that have counted nothing.",
                width=6,
                height=4,
            )
        ),
        _number(
            Panel(
                "Endpoints",
                "moe_telemetry_build_info",
                Query(expr=f"count({select('moe_telemetry_build_info')})", legend="endpoints", instant=True),
                note="Endpoints that are scraped, one a node.",
                width=6,
                height=4,
            )
        ),
        _number(
            Panel("Finished", _FINISHED, Query(expr=gauge(_FINISHED, pick="min"), legend="finished"), width=6, height=4)
        ),
    ]


def _number(panel: Panel) -> AnyPanel:
    return number(panel)


def _exports() -> list[AnyPanel]:
    age = Query(expr=f"time() - max by (instance) ({select(_STAMP)})", legend=_BY_ENDPOINT)
    routers = (
        Query(expr=gauge(_EXPECTED), legend="expected"),
        Query(expr=gauge(_OBSERVED), legend="observed"),
    )
    return [
        lines(
            Panel(
                "Age of the last export",
                _STAMP,
                age,
                alert="MoeTelemetryStalled",
                note="A sawtooth as high as the time between two exports; a slope is an endpoint that stands still.",
            )
        ),
        lines(
            Panel(
                "Training step",
                "moe_telemetry_step",
                Query(expr=gauge("moe_telemetry_step", "instance"), legend=_BY_ENDPOINT),
            )
        ),
        lines(Panel("Routers", _OBSERVED, routers, note="Expected and observed should be one line.")),
        lines(
            Panel(
                "Failed exports",
                _ERRORS,
                Query(expr=f"sum by (exporter) (increase({select(_ERRORS)}[$__rate_interval]))", legend="{{exporter}}"),
                note="In each interval, over all endpoints; what failed before the first scrape is in the table below.",
            )
        ),
    ]


def _costs() -> list[AnyPanel]:
    skipped = f"max by (instance) (increase({select(_SKIPPED)}[$__rate_interval]))"
    return [
        lines(
            Panel(
                "Time spent in step()",
                _OVERHEAD,
                Query(expr=rate(_OVERHEAD, "instance"), legend=_BY_ENDPOINT),
                unit="percentunit",
                note="As a share of wall time, by endpoint.",
            )
        ),
        lines(
            Panel(
                "Skipped reductions",
                _SKIPPED,
                Query(expr=skipped, legend=_BY_ENDPOINT),
                note="In each interval; all endpoints of a job skip the same ones.",
            )
        ),
    ]


def _tables() -> list[AnyPanel]:
    return [
        _table(
            "Failed exports since the start",
            _ERRORS,
            ("instance", "exporter"),
            "Exports",
            "MoeTelemetryExporterFailing",
        ),
        _table("Series left out", _DROPPED, ("instance",), "Series"),
        _table("Versions", "moe_telemetry_build_info", ("instance", "version"), ""),
    ]


def _table(title: str, metric: str, labels: tuple[str, ...], value: str, alert: str | None = None) -> AnyPanel:
    query = Query(expr=gauge(metric, *labels), legend="{{instance}}", instant=True)
    columns = {label: label.capitalize() for label in labels} | ({"Value": value} if value else {})
    return label_table(Panel(title, metric, query, alert=alert, width=8, height=6), columns=columns)

"""Panels: how a number, lines, rows of states, bars and a heatmap look in every dashboard.

Panel("MaxVio", "moe_load_max_violation_ratio", of_router("moe_load_max_violation_ratio"), alert="MoeLoadImbalanced")

Title, queries and the metric they are about are all that a dashboard says; description, unit, colours and the link into
the runbook follow from the table of metrics and from the alert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, heatmap, stat, statushistory, timeseries
from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import DashboardLink
from grafana_foundation_sdk.builders.dashboard import Panel as AnyPanel
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DashboardLinkType
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode

from grafana.dashboards.limits import soft_range, thresholds
from grafana.dashboards.queries import Query
from grafana.dashboards.units import unit_of
from grafana.dashboards.variables import DATASOURCE
from moe_telemetry.catalog import METRICS

__all__ = ["Panel", "alert_list", "bars", "buckets", "dressed", "lines", "number", "stacked", "states", "target"]

# where the runbook speaks of metrics that have no alert, by the beginning of their names
_SECTIONS = {
    "moe_replay": "panels-on-replay",
    "moe_ep": "panels-on-expert-parallelism",
    "moe_load": "panels-on-load",
    "moe_expert_relative": "panels-on-load",
    "moe_router_z": "panels-on-scores",
    "moe_router": "panels-on-load",
    "moe_expert_assignments": "panels-on-load",
    "moe_telemetry": "panels-on-telemetry",
    "moe_": "panels-on-scores",
}


@dataclass(frozen=True)
class Panel:
    """What a panel shows, whatever it looks like."""

    title: str
    metric: str
    """The metric that its text is about."""
    queries: Query | tuple[Query, ...]
    alert: str | None = None
    """The alert whose limit is drawn, and whose section of the runbook is linked."""
    unit: str | None = None
    """Where it is not the metric's own, as for a rate."""
    note: str = ""
    """What the metric's own text does not say."""
    width: int = 12
    height: int = 8
    no_value: str = "no data"
    worst: str = "max"
    """`min` where small numbers are bad: the legend then begins with the smallest."""

    @property
    def targets(self) -> tuple[Query, ...]:
        """The queries, also where there is one."""
        return (self.queries,) if isinstance(self.queries, Query) else self.queries

    @property
    def description(self) -> str:
        """What it shows, what is healthy, and what to know besides."""
        about = METRICS[self.metric]
        healthy = f"Healthy: {about.healthy}" if about.healthy else ""
        return "\n\n".join(text for text in (self.note, about.help, healthy) if text)

    @property
    def anchor(self) -> str:
        """The section of the runbook."""
        if self.alert is not None:
            return self.alert.lower()
        return next(section for start, section in _SECTIONS.items() if self.metric.startswith(start))


def lines(panel: Panel) -> AnyPanel:
    """Return lines over time, the worst first in the legend."""
    style = common.GraphThresholdsStyleMode.DASHED if panel.alert else common.GraphThresholdsStyleMode.OFF
    legend = VizLegendOptions().display_mode(common.LegendDisplayMode.TABLE).placement(common.LegendPlacement.RIGHT)
    tooltip = VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    built = dressed(timeseries.Panel(), panel)
    if (least := soft_range(panel.alert)) is not None:
        built = built.axis_soft_min(least[0]).axis_soft_max(least[1])
    return (
        built.line_width(1)
        .fill_opacity(0)
        .show_points(common.VisibilityMode.AUTO)
        .thresholds_style(GraphThresholdsStyleConfig().mode(style))
        .legend(
            legend.show_legend(True)
            .calcs(["lastNotNull", panel.worst])
            .sort_by("Last *")
            .sort_desc(panel.worst == "max")
        )
        .tooltip(tooltip)
    )


def stacked(panel: Panel) -> AnyPanel:
    """Return lines on top of each other: parts of a whole."""
    return lines(panel).stacking(StackingConfig().mode(common.StackingMode.NORMAL)).fill_opacity(30)


def number(panel: Panel, *, named: bool = False) -> AnyPanel:
    """Return one number, green or red; `named` also shows whose it is."""
    text = common.BigValueTextMode.VALUE_AND_NAME if named else common.BigValueTextMode.VALUE
    return (
        dressed(stat.Panel(), panel)
        .text_mode(text)
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.BACKGROUND if panel.alert else common.BigValueColorMode.NONE)
        .reduce_options(_last())
    )


def bars(panel: Panel) -> AnyPanel:
    """Return a bar for each series, as they are now."""
    return (
        dressed(bargauge.Panel(), panel)
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .min(0)
        .reduce_options(_last())
    )


def states(panel: Panel) -> AnyPanel:
    """Return a row for each series and a cell for each time, green or red."""
    return (
        dressed(statushistory.Panel(), panel)
        .show_value(common.VisibilityMode.NEVER)
        .row_height(0.95)
        .fill_opacity(80)
        .line_width(0)
        .max_data_points(100)
        .legend(VizLegendOptions().show_legend(False))
    )


def buckets(panel: Panel) -> AnyPanel:
    """Return a heatmap of a histogram: how many of its observations each bucket took, over time."""
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(32).reverse(False)
    return (
        dressed(heatmap.Panel(), panel, format=PromQueryFormat.HEATMAP)
        .calculate(False)
        .color(color.exponent(0.5).fill("dark-blue"))
        .cell_gap(1)
        .show_legend()
        .y_axis(heatmap.YAxisConfig().unit(panel.unit or unit_of(METRICS[panel.metric])).axis_label("load / mean load"))
    )


def alert_list(*, width: int, height: int) -> AnyPanel:
    """Return the alerts of the run that fire or are about to, from Prometheus's rules or from Grafana's."""
    options = {
        "alertInstanceLabelFilter": '{run="$run"}',
        "alertName": "Moe",
        "dashboardAlerts": False,
        "groupBy": [],
        "groupMode": "default",
        "maxItems": 20,
        "showInstances": True,
        "sortOrder": 3,  # by importance
        "stateFilter": {
            "error": True,
            "firing": True,
            "noData": False,
            "normal": False,
            "pending": True,
            "recovering": True,
        },
        "viewMode": "list",
    }
    text = (
        "Alerts of this run that fire or are pending, by the rules of Prometheus or of Grafana. Empty is well, if the "
        "rules are loaded. An alert's own page has its summary and the link into the runbook."
    )
    panel = AnyPanel().type("alertlist").title("Alerts").description(text).datasource(DATASOURCE).options(options)
    return panel.span(width).height(height).links([_link("Runbook", "runbook")])


def dressed(builder: Any, panel: Panel, *, format: PromQueryFormat = PromQueryFormat.TIME_SERIES) -> Any:
    """Give a panel what all have: title, text, unit, colours, queries, link, size."""
    heading = "Runbook" if panel.alert is None else f"Runbook: {panel.alert}"
    return (
        builder.title(panel.title)
        .description(panel.description)
        .datasource(DATASOURCE)
        .unit(panel.unit or unit_of(METRICS[panel.metric]))
        .thresholds(thresholds(panel.alert))
        .no_value(panel.no_value)
        .links([_link(heading, panel.anchor)])
        .targets([target(query, index, format) for index, query in enumerate(panel.targets)])
        .span(panel.width)
        .height(panel.height)
    )


def target(query: Query, index: int, format: PromQueryFormat) -> Dataquery:
    """Return a query under the letter of its place."""
    builder = (
        Dataquery()
        .ref_id(chr(ord("A") + index))
        .datasource(DATASOURCE)
        .editor_mode(QueryEditorMode.CODE)
        .expr(query.expr)
        .legend_format(query.legend)
        .format(format)
    )
    return builder.instant() if query.instant else builder.range()


def _link(title: str, anchor: str) -> DashboardLink:
    url = f"${{runbook:raw}}#{anchor}"
    return DashboardLink(title).type(DashboardLinkType.LINK).url(url).target_blank(True)


def _last() -> ReduceDataOptions:
    return ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields("")

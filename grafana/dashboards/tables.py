"""Tables: a row for each router with a column for each number, and a row for each set of labels."""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.builders.common import TableSortByFieldState
from grafana_foundation_sdk.builders.dashboard import DashboardLink
from grafana_foundation_sdk.builders.dashboard import Panel as AnyPanel
from grafana_foundation_sdk.models.common import TableCellHeight
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataTransformerConfig,
    DynamicConfigValue,
    MatcherConfig,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.dashboards.limits import thresholds
from grafana.dashboards.panels import Panel, dressed
from grafana.dashboards.queries import Query
from grafana.dashboards.units import unit_of
from moe_telemetry.catalog import METRICS

__all__ = ["Column", "label_table", "router_table"]

# what a row leads to: the layer dashboard, of this router, at the same time
_LAYER = (
    "/d/moe-layer?${datasource:queryparam}&${job:queryparam}&${run:queryparam}&${stage:queryparam}"
    '&var-block=${__data.fields["block"]}&var-layer=${__data.fields["layer"]}&${__url_time_range}'
)


@dataclass(frozen=True)
class Column:
    """One number of every router."""

    title: str
    metric: str
    query: Query
    alert: str | None = None


def router_table(panel: Panel, columns: tuple[Column, ...]) -> AnyPanel:
    """Return a table of routers, those with the largest first column on top; layers are sorted as numbers."""
    built = _table(panel).min_width(90).sort_by([TableSortByFieldState().display_name(columns[0].title).desc(True)])
    for transformation in _joined(columns):
        built = built.with_transformation(transformation)
    link = DashboardLink("This layer").type(DashboardLinkType.LINK).url(_LAYER).target_blank(False)
    built = built.with_override(
        MatcherConfig(id_val="byName", options="layer"), [DynamicConfigValue(id_val="links", value=[link.build()])]
    )
    for column in columns:
        built = built.with_override(MatcherConfig(id_val="byName", options=column.title), _look(column))
    return built


def label_table(panel: Panel, *, columns: dict[str, str]) -> AnyPanel:
    """Return a table of one metric's label sets; `columns` names what is shown, by label or `Value`."""
    hidden = {"Time": True} if "Value" in columns else {"Time": True, "Value": True}
    order = {name: index for index, name in enumerate(columns)}
    options = {"excludeByName": hidden, "indexByName": order, "renameByName": columns}
    return _table(panel).with_transformation(DataTransformerConfig(id_val="organize", options=options))


def _table(panel: Panel) -> table.Panel:
    built: table.Panel = dressed(table.Panel(), panel, format=PromQueryFormat.TABLE)
    return built.cell_height(TableCellHeight.SM).filterable(True)


def _joined(columns: tuple[Column, ...]) -> list[DataTransformerConfig]:
    """Return what makes one table of many queries: merge rows of equal labels, name columns, order layers."""
    names = {f"Value #{chr(ord('A') + index)}": column.title for index, column in enumerate(columns)}
    order = {name: index for index, name in enumerate(["block", "layer", *names])}
    organize = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": names}
    numbers = {"conversions": [{"targetField": "layer", "destinationType": "number"}], "fields": {}}
    return [
        DataTransformerConfig(id_val="merge", options={}),
        DataTransformerConfig(id_val="convertFieldType", options=numbers),
        DataTransformerConfig(id_val="organize", options=organize),
    ]


def _look(column: Column) -> list[DynamicConfigValue]:
    look = [DynamicConfigValue(id_val="unit", value=unit_of(METRICS[column.metric]))]
    if column.alert is not None:
        look.append(DynamicConfigValue(id_val="thresholds", value=thresholds(column.alert).build()))
        look.append(DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}))
    return look

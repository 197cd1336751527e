"""The variables of the dashboards: data source, job, endpoint, run, stage, block, layer, runbook."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import ConstantVariable, DatasourceVariable, QueryVariable
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.dashboard import VariableHide, VariableOption, VariableRefresh, VariableSort

__all__ = ["DATASOURCE", "DATASOURCE_UID", "RUNBOOK", "variables"]

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
DATASOURCE_UID = "moe-prometheus"
"""The data source of `provisioning/datasources`; where Grafana has none of this id, it takes its first Prometheus."""
RUNBOOK = "runbook.md"
"""Where the runbook is; `moe-telemetry dashboards --runbook-url` writes another address."""

Variable = ConstantVariable | DatasourceVariable | QueryVariable

_CHOSEN = 'job=~"$job"'
# the order of layers is that of numbers: 2 before 10
_NUMERIC, _LATEST_FIRST, _BY_NAME = (
    VariableSort.NUMERICAL_ASC,
    VariableSort.ALPHABETICAL_DESC,
    VariableSort.ALPHABETICAL_ASC,
)


def variables(
    *, stage: bool, router: bool, instance: bool
) -> Iterator[ConstantVariable | DatasourceVariable | QueryVariable]:
    """Yield the variables of a dashboard.

    Args:
        stage: it shows metrics with a stage.
        router: it shows metrics of single routers.
        instance: endpoints can be chosen. Elsewhere the variable is there, as in every dashboard of Prometheus, and
            hidden: gauges of a job come from one endpoint, and would be gone with any other chosen.
    """
    # the builders of these two have no method for what is set after them
    source = DatasourceVariable("datasource").label("Data source").type("prometheus")
    source.build().current = VariableOption(text="MoE telemetry", value=DATASOURCE_UID, selected=True)
    yield source
    yield _many("job", "moe_telemetry_step").label("Job")
    endpoints = _many("instance", f"moe_telemetry_step{{{_CHOSEN}}}").label("Instance")
    yield endpoints if instance else endpoints.hide(VariableHide.HIDE_VARIABLE)
    yield _one("run", f"moe_telemetry_step{{{_CHOSEN}}}").label("Run").sort(_LATEST_FIRST)
    if stage:
        train = VariableOption(text="train", value="train", selected=True)
        tokens = f'moe_router_tokens_total{{{_CHOSEN}, run="$run"}}'
        yield _one("stage", tokens).label("Stage").current(train)
    if router:
        tokens = f'moe_router_tokens_total{{{_CHOSEN}, run="$run"}}'
        yield _many("block", tokens).label("Block")
        of_block = f'moe_router_tokens_total{{{_CHOSEN}, run="$run", block=~"$block"}}'
        yield _many("layer", of_block).label("Layer").sort(_NUMERIC)
    runbook = ConstantVariable("runbook").label("Runbook").value(RUNBOOK)
    runbook.build().hide = VariableHide.HIDE_VARIABLE
    yield runbook


def _one(name: str, series: str) -> QueryVariable:
    query = f"label_values({series}, {name})"
    return (
        QueryVariable(name)
        .datasource(DATASOURCE)
        .query({"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(_BY_NAME)
        .include_all(False)
        .multi(False)
    )


def _many(name: str, series: str) -> QueryVariable:
    everything = VariableOption(text="All", value="$__all", selected=True)
    return _one(name, series).multi(True).include_all(True).all_value(".+").current(everything)

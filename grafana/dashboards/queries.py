"""PromQL from the table of metrics: which series a dashboard shows, and how those of all endpoints become one.

Counters are exported in shares, one by each endpoint, so they are added up. A gauge comes from one endpoint, or from
two while a job restarts: the largest (or smallest) is taken, never a mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_telemetry.catalog import metric_of

__all__ = [
    "BY_ROUTER",
    "ROUTER",
    "Query",
    "gauge",
    "of_router",
    "over",
    "rate",
    "select",
    "sortable",
    "worst_router",
]

ROUTER = ("block", "layer")
BY_ROUTER = "{{block}}.{{layer}}"

# variables of which one value is chosen, and those of which any number may be
_ONE, _MANY = ("run", "stage"), ("block", "layer")


@dataclass(frozen=True, kw_only=True)
class Query:
    """One question of a panel to Prometheus."""

    expr: str
    legend: str
    instant: bool = False
    """Only the value at the end of the time range, for tables and bars."""


def select(name: str, *, any_stage: bool = False, **matchers: str) -> str:
    """Return the selector of the series of a metric that the dashboard's variables choose."""
    labels = {"run", *metric_of(name).labels} - ({"stage"} if any_stage else set())
    parts = ['job=~"$job"', 'instance=~"$instance"']
    parts += [f'{label}="${label}"' for label in _ONE if label in labels]
    parts += [f'{label}=~"${label}"' for label in _MANY if label in labels]
    parts += [f'{label}="{value}"' for label, value in matchers.items()]
    return f"{name}{{{', '.join(parts)}}}"


def gauge(name: str, *by: str, pick: str = "max", **matchers: str) -> str:
    """Return a gauge, one series for each combination of the labels `by`."""
    series = select(name, any_stage=False, **matchers)
    return f"{pick} by ({', '.join(by)}) ({series})" if by else f"{pick}({series})"


def rate(name: str, *by: str, any_stage: bool = False, **matchers: str) -> str:
    """Return what a counter grows by in a second, added up over endpoints."""
    grown = f"rate({select(name, any_stage=any_stage, **matchers)}[$__rate_interval])"
    return f"sum by ({', '.join(by)}) ({grown})" if by else f"sum({grown})"


def over(part: str, whole: str) -> str:
    """Return a ratio that is absent where the whole is 0: a share of nothing is not a number."""
    return f"{part} / ({whole} > 0)"


def of_router(name: str, *, pick: str = "max") -> Query:
    """Return a gauge of every router."""
    return Query(expr=gauge(name, *ROUTER, pick=pick), legend=BY_ROUTER)


def worst_router(name: str, *, pick: str = "max") -> Query:
    """Return the router where a gauge is largest, or smallest, now: its name is the legend."""
    first = "topk" if pick == "max" else "bottomk"
    return Query(expr=f"{first}(1, {gauge(name, *ROUTER, pick=pick)})", legend=BY_ROUTER, instant=True)


def sortable(name: str) -> Query:
    """Return a gauge of every router whose rows come in the order of the model: decoder.003 before decoder.010.

    Prometheus orders series by their labels as text, and a panel with a row a series has no order of its own.
    """
    router = f'label_replace({select(name)}, "row", "00$1", "layer", "(.)")'
    router = f'label_replace({router}, "row", "0$1", "layer", "(..)")'
    router = f'label_replace({router}, "row", "$1", "layer", "(...+)")'
    return Query(expr=f"max by (block, row) ({router})", legend="{{block}}.{{row}}")

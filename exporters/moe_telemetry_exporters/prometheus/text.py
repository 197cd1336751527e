"""Snapshot to the Prometheus and OpenMetrics text formats, fast enough for one series an expert.

`prometheus_client.generate_latest` takes ten times as long for 61 layers of 256 experts, most of it
on labels that are the same in every scrape. Here they are kept, as a template for the values.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from moe_telemetry.catalog import Columns, Metric, metric_of
from moe_telemetry.snapshot import Snapshot

__all__ = ["TextRenderer", "label_text", "number_text"]


class Template(NamedTuple):
    """The text of one metric with a place for each value, and the names and labels that it was made of."""

    constant: str
    series: tuple[tuple[str, tuple[Mapping[str, str], ...]], ...]
    text: str


class TextRenderer:
    """Renders snapshots, and remembers templates from one to the next; threads may share it."""

    def __init__(self) -> None:
        self._templates: dict[str, Template] = {}

    def render(self, snapshot: Snapshot, *, openmetrics: bool, names: Container[str] | None = None) -> bytes:
        """Return what this endpoint exports of `snapshot`, all of it or the metrics of some names.

        A metric is named by itself (in OpenMetrics without `_total`) or by one of its series, and is whole in
        either case: a part of a histogram would be none.
        """
        constant = label_text({"run": snapshot.run, **snapshot.labels})
        parts = []
        for metric, group in groupby(snapshot.columns("node"), lambda columns: metric_of(columns.name)):
            columns = list(group)
            if names is None or _is_named(metric, columns, names):
                parts.append(_head(metric, openmetrics=openmetrics))
                values = tuple(chain.from_iterable(one.values for one in columns))
                parts.append(self._template(metric, constant, columns) % _printable(values))
        if openmetrics:
            parts.append("# EOF\n")
        return "".join(parts).encode(errors="replace")  # a run's id may come from a variable that is no UTF-8

    def _template(self, metric: Metric, constant: str, columns: Sequence[Columns]) -> str:
        known = self._templates.get(metric.name)
        series = tuple((one.name, one.labels) for one in columns)
        # the core hands out the same labels each time, so that comparing them is comparing addresses
        if known is None or known.constant != constant or known.series != series:
            known = Template(constant, series, "".join(_lines(constant, columns)))
            self._templates[metric.name] = known
        return known.text


def label_text(labels: Mapping[str, str]) -> str:
    """Return labels as they stand between braces, values escaped."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def number_text(value: float) -> str:
    """Return a number as Prometheus reads it, whole numbers in full."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _is_named(metric: Metric, columns: Sequence[Columns], names: Container[str]) -> bool:
    family = metric.name.removesuffix("_total")
    return metric.name in names or family in names or any(one.name in names for one in columns)


def _printable(values: Sequence[float]) -> tuple[object, ...]:
    return tuple(values) if all(map(math.isfinite, values)) else tuple(map(number_text, values))


def _lines(constant: str, columns: Sequence[Columns]) -> Iterator[str]:
    for name, all_labels, _ in columns:
        for labels in all_labels:
            own = label_text(labels)
            text = f"{constant},{own}" if own else constant
            yield f"{name}{{{text.replace('%', '%%')}}} %s\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _head(metric: Metric, *, openmetrics: bool) -> str:
    # OpenMetrics names the family of a counter without _total, and escapes quotes in help
    family = metric.name.removesuffix("_total") if openmetrics else metric.name
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    quoted = text.replace('"', r"\"") if openmetrics else text
    return f"# HELP {family} {quoted}\n# TYPE {family} {metric.kind}\n"

"""What a metric and a sample are: the rows of the table, and the numbers that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Columns", "Metric", "Sample"]

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["node", "job", "process"]


class Sample(NamedTuple):
    """One number to export: a metric's name as Prometheus shows it, its labels, its value."""

    name: str
    labels: Mapping[str, str]
    value: float


class Columns(NamedTuple):
    """Samples of one name, their labels and values side by side: for sinks that take many at once.

    A histogram comes as three in turn for each set of labels: buckets, sum, count.
    """

    name: str
    labels: tuple[Mapping[str, str], ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    """The Prometheus name, `_total` included; a histogram's samples end in `_bucket`, `_sum` and `_count`."""
    kind: Kind
    labels: tuple[str, ...] = ()
    unit: str
    """UCUM unit, annotations in braces: `{token}`, `1` for ratios, `s`."""
    help: str
    source: Source
    """Which endpoint exports it: `node`, every node its own ranks' share, so that `sum` is the job's
    total; `job`, the first node alone, for the whole job; `process`, every endpoint about itself."""
    healthy: str = ""
    """The range of a healthy run, and what to look at when the metric leaves it."""
    formula: str = ""
    """How it is computed, and where the formula is from."""

    @property
    def otel_name(self) -> str:
        """The OpenTelemetry name: the same words with dots, without `_total`."""
        return self.name.removesuffix("_total").replace("_", ".")

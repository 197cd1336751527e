"""Snapshot to the Prometheus and OpenMetrics text formats, fast enough for one series an expert.

`prometheus_client.generate_latest` takes ten times as long for 61 layers of 256 experts, most of it
on labels that are the same in every scrape. Here they are kept, as a template for the values.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from moe_telemetry.catalog import METRICS
from moe_telemetry.snapshot import Snapshot

__all__ = ["TextRenderer", "label_text", "number_text"]


class Template(NamedTuple):
    """The text of one metric with a place for each value, and the labels that it was made of."""

    constant: str
    labels: tuple[Mapping[str, str], ...]
    text: str


class TextRenderer:
    """Renders snapshots, and remembers templates from one to the next; threads may share it."""

    def __init__(self) -> None:
        self._templates: dict[str, Template] = {}

    def render(self, snapshot: Snapshot, *, openmetrics: bool, names: Container[str] | None = None) -> bytes:
        """Return what this endpoint exports of `snapshot`, all of it or the series of some names."""
        constant = label_text({"run": snapshot.run, **snapshot.labels})
        parts = []
        for name, labels, values in snapshot.columns("node"):
            if names is None or name in names:
                parts.append(_head(name, openmetrics=openmetrics))
                parts.append(self._template(name, constant, labels) % _printable(values))
        if openmetrics:
            parts.append("# EOF\n")
        return "".join(parts).encode()

    def _template(self, name: str, constant: str, labels: tuple[Mapping[str, str], ...]) -> str:
        known = self._templates.get(name)
        # the core hands out the same labels each time, so that comparing them is comparing addresses
        if known is None or known.constant != constant or known.labels != labels:
            known = Template(constant, labels, "".join(_line(name, constant, own) for own in labels))
            self._templates[name] = known
        return known.text


def label_text(labels: Mapping[str, str]) -> str:
    """Return labels as they stand between braces, values escaped."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def number_text(value: float) -> str:
    """Return a number as Prometheus reads it, whole numbers in full."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _printable(values: Sequence[float]) -> tuple[object, ...]:
    return tuple(values) if all(map(math.isfinite, values)) else tuple(map(number_text, values))


def _line(name: str, constant: str, labels: Mapping[str, str]) -> str:
    own = label_text(labels)
    text = f"{constant},{own}" if own else constant
    return f"{name}{{{text.replace('%', '%%')}}} %s\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _head(name: str, *, openmetrics: bool) -> str:
    metric = METRICS[name]
    # OpenMetrics names the family of a counter without _total, and escapes quotes in help
    family = name.removesuffix("_total") if openmetrics else name
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    quoted = text.replace('"', r"\"") if openmetrics else text
    return f"# HELP {family} {quoted}\n# TYPE {family} {metric.kind}\n"

"""The parts of a frame of `moe-telemetry watch`: alerts, curves, heatmap and the table of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from typing import Any, NamedTuple

from rich import box
from rich.color import Color
from rich.style import Style
from rich.table import Table
from rich.text import Text

__all__ = ["age", "alerts", "count", "curves", "heatmap", "layers"]

Document = Mapping[str, Any]
Row = Mapping[str, Any]
Bad = AbstractSet[tuple[str | None, str | None]]
"""Layers and columns that a standing alert is about."""

SEVERITIES = {"critical": "bold red", "warning": "yellow", "info": "blue"}
# of log2(load / mean) from -3 to 3: blue is less, orange more, and an even load is a grey that any background bears
_STOPS = (
    (25, 105, 225),
    (65, 122, 190),
    (98, 126, 158),
    (126, 128, 130),
    (166, 128, 88),
    (208, 120, 46),
    (252, 112, 8),
)
_DEAD = Color.from_rgb(0, 0, 0)
# of the table, around it and between two columns
_EDGES, _BETWEEN = 3, 2
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~:+*#"


class Column(NamedTuple):
    """One column of the table."""

    title: str
    name: str
    show: Callable[[Any], str]
    rank: int
    """Of the columns that a terminal has no room for, those with the largest are left out."""
    is_optional: bool = False
    """Left out where no layer has a value."""


def percent(value: float) -> str:
    """Return a share as text, small ones with more digits."""
    return f"{value:.2%}" if 0 < value < 0.1 else f"{value:.1%}"


def count(value: float) -> str:
    """Return a number of things, short."""
    if value < 1e4:
        return f"{value:,.0f}"
    size, letter = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= pair[0])
    return f"{value / size:.4g}{letter}"


def age(seconds: float) -> str:
    """Return a duration as a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _digits(places: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{places}f}"


COLUMNS = (
    Column("tokens", "tokens", count, 7),
    Column("MaxVio", "max_violation", _digits(2), 0),
    Column("MinVio", "min_violation", _digits(2), 9),
    Column("CV", "cv", _digits(3), 10),
    Column("entropy", "load_entropy", _digits(3), 5),
    Column("Gini", "gini", _digits(3), 12),
    Column("dead", "dead_experts", str, 1),
    Column("hottest", "hottest", str, 8),
    Column("scores", "score_entropy", _digits(3), 6, is_optional=True),
    Column("margin", "boundary_margin", _digits(3), 11, is_optional=True),
    Column("agree", "agreement", percent, 2, is_optional=True),
    Column("zero", "zero_overlap", percent, 3, is_optional=True),
    Column("cover", "coverage", percent, 4, is_optional=True),
)
OF_ALERT = {
    "MoeLoadImbalanced": "max_violation",
    "MoeExpertsDead": "dead_experts",
    "MoeRouterEntropyCollapsed": "score_entropy",
    "MoeReplayAgreementLow": "agreement",
    "MoeReplayZeroOverlapHigh": "zero_overlap",
    "MoeReplayCoverageLow": "coverage",
}
CURVES = (
    ("tokens/s", "tokens_per_second", count),
    ("MaxVio", "max_violation", _digits(2)),
    ("dead", "dead", _digits(0)),
    ("entropy", "load_entropy", _digits(3)),
    ("scores", "score_entropy", _digits(3)),
    ("agree", "agreement", percent),
    ("zero", "zero_overlap", percent),
)


def alerts(document: Document) -> list[Text]:
    """Return a line a rule, with its worst layer."""
    groups: dict[str, list[Row]] = {}
    for alert in document["alerts"]:
        groups.setdefault(alert["name"], []).append(alert)
    lines = [_alert(group, document["now"]) for group in groups.values()]
    cause = document["health"]["misalignment"]
    if cause not in {None, "aligned"}:
        lines.append(Text(f"cause found: {cause}, offset {document['health']['misalignment_offset']}", style="dim"))
    return lines


def _alert(group: Sequence[Row], now: float) -> Text:
    is_low = group[0]["name"].endswith(("Low", "Collapsed"))
    worst = (min if is_low else max)(group, key=lambda alert: alert["value"] or 0.0)
    stands = max(0.0, now - min(alert["since"] for alert in group))
    is_firing = any(alert["state"] == "firing" for alert in group)
    state = f"for {age(stands)}" if is_firing else f"pending, {age(stands)} of {age(worst['hold_seconds'])}"
    line = Text().append(f"{worst['severity']:<10}", style=SEVERITIES.get(worst["severity"], ""))
    line.append(worst["name"], style="bold" if is_firing else "").append(f" ({state})", style="dim")
    others = f", and {len(group) - 1} more" if len(group) > 1 else ""
    return line.append(f"  {worst['summary']}{others}")


def curves(document: Document, width: int, *, is_ascii: bool = False) -> list[Text]:
    """Return a line a measure: its last hour for the layer that was asked for, else the worst, and the last value."""
    bars = _ASCII_BARS if is_ascii else _BARS
    curves = document["curves"]
    found = []
    num_columns = 2 if width >= 100 else 1
    room = width // num_columns - 24
    for title, name, show in CURVES:
        values = (
            curves["tokens_per_second"] if name == "tokens_per_second" else _of_measure(curves["measures"].get(name))
        )
        if known := [value for value in values if value is not None]:
            line = Text().append(f"{title:<9}", style="dim").append(f"{show(known[-1]):>8}  ")
            found.append(line.append(_sparkline(values, room, bars), style="cyan"))
    if num_columns == 1:
        return found
    half = (len(found) + 1) // 2
    return [_beside(*pair, width // 2) for pair in zip_longest(found[:half], found[half:], fillvalue=Text())]


def _beside(left: Text, right: Text, width: int) -> Text:
    left = left.copy()
    left.pad_right(width - left.cell_len)
    return left.append_text(right)


def _of_measure(measure: Mapping[str, Any] | None) -> Sequence[float | None]:
    return [] if measure is None else measure["layer"] or measure["worst"]


def _sparkline(values: Sequence[float | None], width: int, bars: str) -> str:
    """Return the last values as bars between the least and the largest of them; a gap is a space."""
    shown = (
        values if len(values) <= width else [values[at * len(values) // width] for at in range(1, width)] + [values[-1]]
    )
    known = [value for value in shown if value is not None]
    low, high = min(known), max(known)
    span = high - low
    return "".join(
        " " if value is None else bars[round((value - low) / span * (len(bars) - 1)) if span else 0] for value in shown
    )


def heatmap(document: Document, width: int, max_lines: int) -> list[Text]:
    """Return the load of every expert, two layers a line; experts that share a cell show the one farthest from even."""
    rows = [(row["key"], load) for row, load in zip(document["layers"], document["load_percent"], strict=True) if load]
    if not rows or max_lines < 1:
        return []
    room = width - 12
    num_experts = max(len(load) for _, load in rows)
    per_cell = math.ceil(num_experts / room)
    repeat = max(1, min(4, room // num_experts))
    step = max(1, math.ceil(len(rows) / (2 * max_lines)))
    # with more layers than lines, neighbours share one as well
    merged = [(rows[at][0], _farthest([load for _, load in rows[at : at + step]])) for at in range(0, len(rows), step)]
    cells = [
        (key, [_farthest([[each] for each in load[at : at + per_cell]])[0] for at in range(0, len(load), per_cell)])
        for key, load in merged
    ]
    lines = [_line(top, bottom, repeat) for top, bottom in zip_longest(cells[::2], cells[1::2])]
    shared = f"; {step} layers by {per_cell} experts a cell, the farthest from even" if step * per_cell > 1 else ""
    return [*lines, Text(f"{'':12}load over its mean: blue less, orange more, black no token{shared}", style="dim")]


def _line(top: tuple[str, list[int]], bottom: tuple[str, list[int]] | None, repeat: int) -> Text:
    line = Text(no_wrap=True).append(f"{top[0]:>10.10}  ", style="dim")
    for upper, lower in zip_longest(top[1], [] if bottom is None else bottom[1]):
        style = Style(color=_colour(upper), bgcolor=_colour(lower))
        line.append("▀" * repeat if upper is not None else "▄" * repeat, style=style)
    return line


def _farthest(loads: Sequence[Sequence[int]]) -> list[int]:
    def distance(percent: int) -> float:
        return abs(math.log2(percent / 100)) if percent else math.inf

    return [max((each for each in column if each is not None), key=distance) for column in zip_longest(*loads)]


def _colour(percent: int | None) -> Color | None:
    if not percent:
        return None if percent is None else _DEAD
    place = min(6.0, max(0.0, math.log2(percent / 100) + 3))
    below = min(5, int(place))
    mixed = (round(a + (place - below) * (b - a)) for a, b in zip(_STOPS[below], _STOPS[below + 1], strict=True))
    return Color.from_rgb(*mixed)


def layers(document: Document, width: int, max_rows: int | None) -> Table:
    """Return the table; where there is no room for all layers, those with an alert or the largest MaxVio stay."""
    bad = {
        (alert["layer"], OF_ALERT.get(alert["name"]))
        for alert in document["alerts"]
        if document["stage"] == "train" or alert["name"].startswith("MoeReplay")
    }
    rows = [dict(row, hottest=_hottest(row)) for row in document["layers"]]
    shown = _most_notable(rows, {key for key, _ in bad}, max_rows)
    columns = _fitting(shown, width, bad)
    hidden = len(rows) - len(shown)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption=f"{hidden} more layers; --once shows all" if hidden else None,
        caption_justify="left",
    )
    for title in ("layer", *(column.title for column in columns)):
        table.add_column(title, justify="left" if title == "layer" else "right", no_wrap=True)
    for row in shown:
        table.add_row(*_cells(row, columns, bad))
    return table


def _hottest(row: Row) -> str | None:
    return None if row["hottest_share"] is None else f"{row['hottest_expert']} ({percent(row['hottest_share'])})"


def _most_notable(rows: Sequence[Row], alarmed: set[str | None], max_rows: int | None) -> list[Row]:
    if max_rows is None or len(rows) <= max_rows:
        return list(rows)
    ranked = sorted(rows, key=lambda row: (row["key"] not in alarmed, -(row["max_violation"] or 0.0)))
    kept = {row["key"] for row in ranked[:max_rows]}
    return [row for row in rows if row["key"] in kept]


def _fitting(rows: Sequence[Row], width: int, bad: Bad) -> list[Column]:
    """Return the columns that have values and room; those that an alert is about are the last to go."""
    alarmed = {name for _, name in bad}
    columns = [
        column for column in COLUMNS if not (column.is_optional and all(row[column.name] is None for row in rows))
    ]
    room = width - _EDGES - max((len(row["key"]) for row in rows), default=0)
    widths = {
        column.name: max([len(column.title), *(len(_cell(row, column, bad)) for row in rows)]) + _BETWEEN
        for column in columns
    }
    while columns and sum(widths[column.name] for column in columns) > room:
        columns.remove(max(columns, key=lambda column: (column.name not in alarmed, column.rank)))
    return columns


def _cells(row: Row, columns: Sequence[Column], bad: Bad) -> Iterator[Text]:
    yield Text(row["key"])
    for column in columns:
        yield Text(_cell(row, column, bad), style="bold yellow" if (row["key"], column.name) in bad else "")


def _cell(row: Row, column: Column, bad: Bad) -> str:
    value = row[column.name]
    # not by colour alone: a file has none
    mark = "!" if (row["key"], column.name) in bad else ""
    return "-" if value is None else f"{mark}{column.show(value)}"

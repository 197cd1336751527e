"""Report: the pictures and figures of an analysis as one HTML file that asks for nothing else.

A content security policy in the file itself keeps it so. Names of runs, stages and files are the user's text and
are escaped; light and dark follow the reader's system.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from html import escape

from moe_telemetry._version import __version__
from moe_telemetry.analysis.concentration import Concentration
from moe_telemetry.analysis.drift import Drift
from moe_telemetry.analysis.frames import Columns
from moe_telemetry.analysis.pictures import DARK, LIGHT, Result, draw
from moe_telemetry.analysis.predictability import Predictability

__all__ = ["report"]

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --line: #d1d9e0; --faint: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --line: #3d444d; --faint: #9198a1; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
p, li { max-width: 45rem; }
.faint { color: var(--faint); overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; }
img { width: 100%; height: auto; }
figcaption { color: var(--faint); font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th { vertical-align: bottom; }
""".strip()

_READING = {
    Concentration: (
        (
            "coverage is the share of all assignments that the N hottest experts (top) take; uniform coverage is "
            "that of a balanced router, N / E."
        ),
        (
            "persistence is the share of the N hottest experts of a step that are among the N hottest of the next "
            "captured step; chance persistence is that of hot experts drawn at random."
        ),
        "unmade are choices of -1, invalid are ids of E or more: neither is an assignment.",
    ),
    Predictability: (
        "A router is given the hidden states that the router before it has seen, and chooses by its own weights.",
        (
            "recall is the share of its choices that it would have made a layer earlier, for the same token; "
            "chance recall is that of a random guess, K / E."
        ),
        (
            "cosine, spearman and hot overlap compare the load predicted for a step with the actual one, and are "
            "means over steps; those of the last step are the same for the load of the captured step before."
        ),
        "An empty cell is a figure that does not exist, such as the rank correlation of a constant load.",
    ),
    Drift: (
        "total variation is the share of assignments that would have to go elsewhere to turn one load into the other.",
        "jensen shannon is a divergence in bits, from 0 (equal) to 1 (nothing in common).",
        "hot overlap is the share of the hottest experts of one trace that are so in the other.",
    ),
}


def report(result: Result, title: str) -> str:
    """Return the report of a result as HTML."""
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *_head(result),
            *_pictures(result),
            "<h2>How to read it</h2>",
            _list(_READING[type(result)]),
            "<h2>By router</h2>",
            _table(result.layer_columns() if isinstance(result, Concentration) else result.columns()),
            f'<p class="faint">moe-telemetry {escape(__version__)}</p>',
            "</body></html>\n",
        )
    )


def _head(result: Result) -> Iterator[str]:
    if isinstance(result, Drift):
        yield f'<p class="faint">{escape(result.before)} against {escape(result.after)}</p>'
    else:
        selection = str(result.selection) or "all tokens"
        yield f'<p class="faint">{escape(result.trace)}, {escape(selection)}</p>'
    if result.notes:
        yield _list(result.notes)


def _pictures(result: Result) -> Iterator[str]:
    for light, dark in zip(draw(result, LIGHT), draw(result, DARK), strict=True):
        yield (
            f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_data(dark.png)}">'
            f'<img src="{_data(light.png)}" alt="{escape(light.text)}"></picture>'
            f"<figcaption>{escape(light.text)}</figcaption></figure>"
        )


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _table(columns: Columns) -> str:
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns.names)
    rows = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in columns.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))

"""ConsoleExporter: a live table of the layers on a terminal, a line a snapshot everywhere else."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moe_telemetry.errors import ConfigError
from moe_telemetry.snapshot import Snapshot
from moe_telemetry.summary import HotExpert, JobSummary, LayerLoad, tokens_by_stage
from moe_telemetry_exporters.console_logs import LogsAboveTable
from moe_telemetry_exporters.settings import check_types

__all__ = ["ConsoleExporter"]

_LINES_AROUND_TABLE = 8
_NUM_HOT = 3
_UNBROKEN = "\u00a0"
"""A space at which no line ends."""


@dataclass(kw_only=True, eq=False)
class ConsoleExporter:
    """Shows the load of every layer over the window since the snapshot before.

    On a terminal what the program prints and logs appears above the table; elsewhere (a file, a pipe) each
    snapshot is a line for every stage that saw a token.
    """

    max_rows: int = 24
    """Most layers in the table; it has fewer on a low terminal, and those with the largest MaxVio stay."""
    stream: TextIO | None = None
    """Where to write; None is the standard output."""
    console: Console | None = None
    """A console of rich to write to, in place of `stream`."""

    _live: Live | None = field(init=False, default=None, repr=False)
    _logs: LogsAboveTable | None = field(init=False, default=None, repr=False)
    _used: Console | None = field(init=False, default=None, repr=False)
    _last: Snapshot | None = field(init=False, default=None, repr=False)
    _table: Table | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_types(self)
        if self.max_rows < 1:
            raise ConfigError(f"max_rows={self.max_rows!r}: expected a whole number, 1 or more")

    def export(self, snapshot: Snapshot) -> None:
        """Draw the table anew, or print one line."""
        console = self._used = self._used or self.console or Console(file=self.stream)
        seconds = _seconds_between(self._last, snapshot)
        self._last = snapshot
        if console.is_terminal:
            self._draw(console, snapshot, seconds)
            return
        for stage in tokens_by_stage(snapshot, "window"):
            line = _shown(_line(snapshot, JobSummary.of(snapshot, stage=stage), seconds), console)
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _draw(self, console: Console, snapshot: Snapshot, seconds: float | None) -> None:
        if self._live is None:
            streams = sys.stdout, sys.stderr
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
            self._logs = LogsAboveTable(*streams)
        summary = JobSummary.of(snapshot)
        if summary.layers or self._table is None:
            # a window without tokens, as the last one often is, leaves the table as it was
            self._table = _table(summary, self.max_rows, console)
        rate = summary.tokens / seconds if seconds else None
        header = Text(_shown(_header(snapshot, rate), console), style="bold", no_wrap=True)
        self._live.update(Group(header, self._table), refresh=True)

    def close(self) -> None:
        """Leave the last table on the terminal."""
        if self._logs is not None:
            self._logs.close()
            self._logs = None
        if self._live is not None:
            self._live.stop()
            self._live = None


def _seconds_between(last: Snapshot | None, now: Snapshot) -> float | None:
    """Return the length of the window, where there was a snapshot before."""
    return now.time - last.time if last is not None and now.time > last.time else None


def _shown(text: str, console: Console) -> str:
    """Return what a console can write in one line: runs, stages and blocks are the user's words."""
    if console.options.ascii_only:
        text = text.replace(_UNBROKEN, " ")
    plain = "".join(char if char.isprintable() or char == _UNBROKEN else "?" for char in text)
    return plain.encode(console.encoding, "replace").decode(console.encoding)


def _header(snapshot: Snapshot, rate: float | None) -> str:
    tokens = ", ".join(f"{stage} {count:,}" for stage, count in tokens_by_stage(snapshot, "total").items())
    words = [f"run {snapshot.run}", f"step {snapshot.step:,}", f"tokens {tokens or 0}"]
    if rate:
        words.append(f"{rate:,.0f} tokens/s")
    return "  ".join(words)


def _table(summary: JobSummary, most_rows: int, console: Console) -> Table:
    num_rows = min(most_rows, max(1, console.size.height - _LINES_AROUND_TABLE))
    ranked = sorted(summary.layers, key=lambda layer: -layer.stats.max_violation)
    shown = {layer.router for layer in ranked[:num_rows]}
    num_hidden = len(summary.layers) - len(shown)
    caption = f"{num_hidden} more layers, each with a lower MaxVio" if num_hidden else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=caption)
    for name in ("layer", "tokens", "MaxVio", "entropy", "dead"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("hottest experts")  # the only column that wraps: no number is cut off
    for layer in summary.layers:
        if layer.router in shown:
            # not plain strings: a name may hold what rich would take for markup
            cells = [Text(_shown(cell, console)) for cell in _cells(layer)]
            table.add_row(*cells, style="bold red" if layer is ranked[0] else None)
    return table


def _cells(layer: LayerLoad) -> list[str]:
    stats = layer.stats
    return [
        str(layer.router),
        f"{layer.counts.tokens:,}",
        f"{stats.max_violation:.2f}",
        f"{stats.entropy:.3f}",
        str(stats.dead_experts),
        "  ".join(f"{hot.expert.expert}{_UNBROKEN}({hot.share:.1%})" for hot in layer.hottest_experts(_NUM_HOT)),
    ]


def _line(snapshot: Snapshot, summary: JobSummary, seconds: float | None) -> str:
    words = [f"moe-telemetry: run {snapshot.run} step {snapshot.step}: {summary.stage} {summary.tokens} tokens"]
    if seconds:
        words.append(f"{summary.tokens / seconds:.0f} tokens/s")
    if (worst := summary.worst_layer) is not None:
        words.append(f"worst MaxVio {worst.stats.max_violation:.2f} in {worst.router}")
        words.append(f"lowest entropy {min(layer.stats.entropy for layer in summary.layers):.3f}")
        words.append(f"dead experts {len(summary.dead_experts)}")
        words.append(f"hottest {_hot_text(summary.hottest_experts(1)[0])}")
    return ", ".join(words)


def _hot_text(hot: HotExpert) -> str:
    return f"{hot.expert} ({hot.share:.1%})"

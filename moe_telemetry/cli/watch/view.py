"""One frame of `moe-telemetry watch`: what the live page shows, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from moe_telemetry.cli.watch.figures import age, alerts, count, curves, heatmap, layers
from moe_telemetry.cli.watch.source import Document

__all__ = ["Frame"]

_STATES = {"live": "green", "late": "yellow", "finished": "dim", "waiting": "dim", "gone": "bold red"}
_MAX_HEAT_LINES = 16
_LINES_AROUND_TABLE = 6
# what moves the cursor, and what turns the direction of the text that follows
_TURNING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROL = dict.fromkeys([*range(32), *range(127, 160), *_TURNING], "\N{REPLACEMENT CHARACTER}")


class Frame:
    """A document drawn for the console's width, and for its height where `is_bounded`."""

    def __init__(self, document: Document, *, gone: str | None = None, is_bounded: bool = False) -> None:
        """`gone` says why the endpoint does not answer any more; the document is then its last one."""
        self._document: Document = _printable(document)
        self._gone = gone
        self._is_bounded = is_bounded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts from top to bottom; the table takes the lines that are left."""
        width = options.max_width
        head = [*self._head(width)]
        yield from head
        if "layers" not in self._document:
            return
        num_lines = len(head)
        for part in self._middle(console, options):
            num_lines += len(part)
            yield from part
        room = max(1, console.size.height - num_lines - _LINES_AROUND_TABLE) if self._is_bounded else None
        yield layers(self._document, width, room)

    def _head(self, width: int) -> Iterator[RenderableType]:
        document = self._document
        state = "gone" if self._gone else document["state"]
        line = Text()
        # a long name must not push the state off the screen
        name = self._fitted(Text(document.get("run", "moe-telemetry"), style="bold"), max(8, width // 3))
        line.append_text(name).append(f"  {state}", style=_STATES.get(state, ""))
        if "layers" in document:
            rates = document["curves"]["tokens_per_second"]
            words = [
                f"step {document['step']:,}",
                f"{count(rates[-1])} tokens/s" if rates and rates[-1] is not None else "",
                f"{document['world_size']} rank{'s' * (document['world_size'] > 1)}",
                f"{document['stage']} of {', '.join(document['stages'])}" if len(document["stages"]) > 1 else "",
                f"{age(document['age_seconds'])} ago" if not self._gone else "",
            ]
            line.append("  " + "  ".join(filter(None, words)))
        yield self._fitted(line, width)
        if text := self._notice():
            yield self._fitted(Text(text, style=_STATES.get(state, "")), width)

    def _fitted(self, line: Text, width: int) -> Text:
        """Cut a line of a screen off at its end; elsewhere it may go on in the next."""
        if self._is_bounded:
            line.truncate(width, overflow="ellipsis")
        return line

    def _notice(self) -> str:
        document = self._document
        if self._gone:
            return self._gone
        if document["state"] == "waiting":
            return "the run has exported nothing yet"
        if document["state"] == "late":
            return "no new snapshot for far longer than usual: training is slow, evaluates, or hangs"
        if not document["leads"]:
            return "not the job's first endpoint: its /metrics has this node's share; below is the whole job"
        return ""

    def _middle(self, console: Console, options: ConsoleOptions) -> Iterator[list[Text]]:
        """Yield alerts, curves and, where colours can be seen, the heatmap, each after an empty line."""
        width, height = options.max_width, console.size.height
        found = [self._fitted(line, width) for line in alerts(self._document)]
        quiet = (
            Text("no alert", style="dim") if self._document["state"] != "finished" else Text("finished", style="dim")
        )
        yield [Text(), *(found or [quiet])]
        if lines := curves(self._document, width, is_ascii=options.ascii_only):
            yield [Text(), *lines]
        if console.color_system is None or console.no_color or options.ascii_only:
            return
        most = min(_MAX_HEAT_LINES, (height - 25) // 2) if self._is_bounded else _MAX_HEAT_LINES
        if lines := heatmap(self._document, width, most):
            yield [Text(), *(self._fitted(line, width) for line in lines)]


def _printable(value: Any) -> Any:  # noqa: ANN401  # whatever JSON has
    """Return a document in which no text can move the cursor: names are the user's."""
    if isinstance(value, str):
        return value.translate(_CONTROL)
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, Mapping):
        return {_printable(name): _printable(each) for name, each in value.items()}
    return value

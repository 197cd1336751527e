"""Looking again and again: a screen on a terminal, a frame for every new snapshot elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from moe_telemetry.cli.watch.source import Document, EndpointError, Source
from moe_telemetry.cli.watch.view import Frame

__all__ = ["Screen", "Watch"]


class Screen(Console):
    """A console where a reader that leaves, such as `head`, is no error of its own but the command line's to judge."""

    def on_broken_pipe(self) -> None:
        """Tell the command line."""
        raise BrokenPipeError


class Watch:
    """Shows an endpoint until Ctrl-C; one that goes away is waited for, with what was seen last."""

    def __init__(self, source: Source, first: Document, *, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._document = first
        self._gone: str | None = None

    def run(self, console: Console) -> None:
        """Return when the user presses Ctrl-C."""
        if console.is_terminal:
            self._on_terminal(console)
            # the screen is gone with the watch; its last frame stays
            console.print(Frame(self._document, gone=self._gone))
        else:
            with suppress(KeyboardInterrupt):
                for frame in self._news():
                    console.print(frame)
                    console.file.flush()

    def _on_terminal(self, console: Console) -> None:
        with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(Frame(self._document, gone=self._gone, is_bounded=True), refresh=True)
                self._look()

    def _news(self) -> Iterator[Frame]:
        """Yield a frame whenever it would say something else."""
        last: tuple[object, ...] | None = None
        while True:
            now = (self._gone, *(self._document.get(name) for name in ("state", "run", "time", "step")))
            if now != last:
                yield Frame(self._document, gone=self._gone)
            last = now
            self._look()

    def _look(self) -> None:
        time.sleep(self._seconds)
        try:
            self._document = self._source.fetch()
        except EndpointError as error:
            self._gone = self._gone or f"since {time.strftime('%H:%M:%S')}: {error}"
        else:
            self._gone = None

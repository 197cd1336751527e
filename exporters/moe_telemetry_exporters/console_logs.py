"""Log lines above a live table: handlers write to the streams that they took when they were made."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import TextIO

__all__ = ["LogsAboveTable"]

Handler = logging.StreamHandler[TextIO]


class LogsAboveTable:
    """Has the log handlers of the terminal write above a table that rich draws, until closed.

    While rich draws, `sys.stdout` and `sys.stderr` print above what is drawn. A handler holds the streams of
    before, and what it writes there would be drawn over.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        """Move the handlers that write to these streams, the standard ones before the drawing began."""
        self._moved: list[tuple[Handler, TextIO, TextIO]] = []
        for before, now in ((stdout, sys.stdout), (stderr, sys.stderr)):
            for handler in [handler for handler in _handlers() if handler.stream is before]:
                handler.setStream(now)
                self._moved.append((handler, before, now))

    def close(self) -> None:
        """Give every handler its stream back, but for one that was given another since."""
        for handler, before, now in self._moved:
            if handler.stream is now:
                handler.setStream(before)
        self._moved.clear()


def _handlers() -> Iterator[Handler]:
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):  # a place holder of the tree has none
            if isinstance(handler, logging.StreamHandler):
                yield handler

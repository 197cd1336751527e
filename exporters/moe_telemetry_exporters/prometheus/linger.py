"""The end of a run as scrapes see it: the endpoint stays until all who scrape have the last snapshot."""

from __future__ import annotations

import threading
import time
from threading import Condition, Event, Thread

from moe_telemetry_exporters.endpoint.server import MetricsServer

__all__ = ["Audience", "end_lingering", "linger"]

_RECENT_SECONDS = 300.0
"""Who scraped so lately scrapes still: intervals are a minute or two at most."""
_AT_EXIT_SECONDS = 5.0
"""Within the time that a monitor gives all its exporters."""
_lingering: set[Farewell] = set()


class Audience:
    """Who scrapes, and who has seen the end of the run."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._last_scrape: dict[str, float] = {}
        self._saw_the_end: set[str] = set()

    def scraped(self, client: str, *, finished: bool) -> None:
        """Note that a client has got a whole snapshot: the last one of the run, or one before."""
        now = time.monotonic()
        with self._changed:
            self._last_scrape = {who: when for who, when in self._last_scrape.items() if now - when < _RECENT_SECONDS}
            self._last_scrape[client] = now
            if finished:
                self._saw_the_end.add(client)
                self._changed.notify_all()

    def wait(self, seconds: float, stop: Event) -> None:
        """Wait until somebody has seen the end, and nobody who has scraped lately has not; or for so long."""
        with self._changed:
            audience = set(self._last_scrape)
            self._changed.wait_for(
                lambda: stop.is_set() or (self._saw_the_end and audience <= self._saw_the_end), seconds
            )

    def wake(self) -> None:
        """Let whoever waits look again."""
        with self._changed:
            self._changed.notify_all()


class Farewell:
    """An endpoint whose exporter is closed."""

    def __init__(self, server: MetricsServer, audience: Audience) -> None:
        self.server = server
        self._audience = audience
        self._stop = Event()
        self._over = Event()

    def run(self, seconds: float) -> None:
        """Serve for so long at most, then close."""
        self._audience.wait(seconds, self._stop)
        self.server.close()
        _lingering.discard(self)
        self._over.set()

    def end(self) -> None:
        """Close now, and free the port."""
        self._stop.set()
        self._audience.wake()
        if not self.server.is_closing:  # it is where this process is the fork of another
            self._over.wait()


def linger(server: MetricsServer, audience: Audience, seconds: float) -> None:
    """Keep an endpoint open for so long at most; a process that ends meanwhile waits for it.

    Where the process is past waiting for threads (a monitor that nobody closed is closed there), it is kept open
    for a few seconds, in this thread.
    """
    farewell = Farewell(server, audience)
    _lingering.add(farewell)
    thread = Thread(target=farewell.run, args=(seconds,), name="moe-telemetry-linger", daemon=False)
    if threading.main_thread().is_alive():
        thread.start()
    else:
        farewell.run(min(seconds, _AT_EXIT_SECONDS))


def end_lingering(port: int) -> None:
    """Close what lingers on a port of this process, for the next run wants it."""
    for farewell in [*_lingering]:
        if farewell.server.port == port:
            farewell.end()

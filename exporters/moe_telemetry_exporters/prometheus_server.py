"""The HTTP endpoint of the Prometheus exporter: paths and their routes, served on threads of its own.

    server = MetricsServer("127.0.0.1", 9464, {"/hello": lambda request: Reply("text/plain", b"hello")})
    ...
    server.close()

One thread waits for connections and each connection has one, so that no client can make another wait. Their
number is bounded, whatever clients do: the files that a process may open belong to training.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock, Thread

from moe_telemetry_exporters.prometheus_http import Handler, Reply, Request, Route

__all__ = ["MetricsServer", "Reply", "Request", "Route"]

_MAX_CONNECTIONS = 64
"""Open at a time; one more closes that which has waited longest for a request."""
_GRACE_SECONDS = 2.0
"""How long `close` lets requests under way be answered."""


class MetricsServer:
    """Serves its routes until closed."""

    def __init__(self, address: str, port: int, routes: Mapping[str, Route]) -> None:
        """Bind at once; raises OSError where the address or the port cannot be had."""
        self.routes = routes
        self.is_closing = False
        self._lock = Lock()
        # in the order in which they began to wait or to be answered
        self._waiting: dict[socket.socket, Thread] = {}
        self._answered: dict[socket.socket, Thread] = {}
        self._listener = _listen(address, port)
        self.port: int = self._listener.getsockname()[1]
        """The port in use, also where port 0 asked for any."""
        self._wake, self._waker = socket.socketpair()
        self._thread = Thread(target=self._accept_until_closed, name="moe-telemetry-endpoint", daemon=True)
        self._thread.start()
        _servers.add(self)

    def refusal(self, request: Request) -> Reply | None:  # noqa: ARG002  # nobody is refused yet
        """Return the answer to who may not ask, None for all others."""
        return None

    def answering(self, connection: socket.socket, *, now: bool) -> None:
        """Note that a connection is in the middle of a request, or waits for one."""
        leave, join = (self._waiting, self._answered) if now else (self._answered, self._waiting)
        with self._lock:
            if (thread := leave.pop(connection, None)) is not None:
                join[connection] = thread

    def close(self) -> None:
        """Free the port, answer the requests under way, and end all connections; promptly, whatever clients do."""
        if self.is_closing:
            return
        self.is_closing = True
        self._waker.send(b"x")
        self._thread.join()
        deadline = time.monotonic() + _GRACE_SECONDS
        with self._lock:
            threads = [*self._waiting.values(), *self._answered.values()]
            _end(*self._waiting)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            _end(*self._waiting, *self._answered)
        for thread in threads:
            thread.join(0.1)

    def _accept_until_closed(self) -> None:
        with selectors.DefaultSelector() as selector, self._wake, self._waker, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self.is_closing:
                selector.select()
                try:
                    connection, client = self._listener.accept()
                except BlockingIOError:
                    continue  # it was the waker, or a client that has left again
                except OSError:
                    time.sleep(0.1)  # no file left to open: it would be tried again at once, and for ever
                    continue
                self._begin(connection, client[0])

    def _begin(self, connection: socket.socket, client: str) -> None:
        thread = Thread(target=self._serve, args=(connection, client), name="moe-telemetry-scrape", daemon=True)
        with self._lock:
            everybody = [*self._waiting, *self._answered]
            if len(everybody) >= _MAX_CONNECTIONS:
                _end(everybody[0])
            self._waiting[connection] = thread
        try:
            thread.start()
        except RuntimeError:  # the machine has no thread left, or the process ends
            self._forget(connection)
            connection.close()

    def _serve(self, connection: socket.socket, client: str) -> None:
        try:
            with connection, suppress(OSError):  # a client may leave at any time
                Handler(connection, client, self)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(connection, None)
            self._answered.pop(connection, None)


def _listen(address: str, port: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(
        address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two programs have one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _end(*connections: socket.socket) -> None:
    """End connections that other threads read from or write to; these see the end and close them."""
    for connection in connections:
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


_servers: weakref.WeakSet[MetricsServer] = weakref.WeakSet()

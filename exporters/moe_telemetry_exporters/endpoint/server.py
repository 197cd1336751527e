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
import ssl
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock, Thread

from moe_telemetry_exporters.endpoint.connection import Handler
from moe_telemetry_exporters.endpoint.credentials import Credentials
from moe_telemetry_exporters.endpoint.http import Reply, Request, Route, Routes
from moe_telemetry_exporters.endpoint.tls import Tls

__all__ = ["MetricsServer", "Reply", "Request", "Route"]

_MAX_CONNECTIONS = 64
"""Open at a time; one more closes that which has waited longest for a request."""
_HANDSHAKE_SECONDS = 10.0
_GRACE_SECONDS = 2.0
"""How long `close` lets requests under way be answered."""


class MetricsServer:
    """Serves its routes until closed."""

    def __init__(
        self,
        address: str,
        port: int,
        routes: Mapping[str, Route],
        *,
        tls: Tls | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Bind at once; raises OSError where the address or the port cannot be had."""
        self.routes = Routes(routes, credentials)
        self.is_closing = False
        self._tls = tls
        self._lock = Lock()
        # in the order in which they began to wait or to be answered
        self._waiting: dict[socket.socket, None] = {}
        self._answered: dict[socket.socket, None] = {}
        self._threads: list[Thread] = []
        self._listener = _listen(address, port)
        self.port: int = self._listener.getsockname()[1]
        """The port in use, also where port 0 asked for any."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._thread = Thread(target=self._accept_until_closed, name="moe-telemetry-endpoint", daemon=True)
        self._thread.start()
        _servers.add(self)

    def answering(self, connection: socket.socket, *, now: bool) -> None:
        """Note that a connection is in the middle of a request, or waits for one."""
        leave, join = (self._waiting, self._answered) if now else (self._answered, self._waiting)
        with self._lock:
            if connection in leave:  # it is not where it has been ended meanwhile
                del leave[connection]
                join[connection] = None

    def close(self) -> None:
        """Free the port, answer the requests under way, and end all connections; promptly, whatever clients do."""
        if self.is_closing:
            return
        self.is_closing = True
        with self._waker:
            self._waker.send(b"x")
        self._thread.join()
        deadline = time.monotonic() + _GRACE_SECONDS
        with self._lock:
            _end(*self._waiting)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            _end(*self._waiting, *self._answered)
        for thread in self._threads:
            thread.join(0.1)

    def forget(self) -> None:
        """Let go of every file without a word to anybody: this process is a fork of the one that serves."""
        self.is_closing = True
        self._lock = Lock()  # a thread that is not here may have held the old one
        self._selector.close()
        for inherited in (self._listener, self._wake, self._waker, *self._waiting, *self._answered):
            with suppress(OSError):
                os.close(inherited.detach())
        self._waiting, self._answered = {}, {}

    def _accept_until_closed(self) -> None:
        with self._selector, self._wake, self._listener:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            while all(key.fileobj is self._listener for key, _ in self._selector.select()):
                try:
                    connection, client = self._listener.accept()
                except BlockingIOError:
                    continue  # a client that has left again
                except OSError:
                    time.sleep(0.1)  # no file left to open: it would be tried again at once, and for ever
                    continue
                self._begin(connection, client[0])

    def _begin(self, connection: socket.socket, client: str) -> None:
        thread = Thread(target=self._serve, args=(connection, client), name="moe-telemetry-scrape", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        with self._lock:
            if len(self._waiting) + len(self._answered) >= _MAX_CONNECTIONS:
                crowd = self._waiting or self._answered
                longest = next(iter(crowd))
                del crowd[longest]
                _end(longest)
            self._waiting[connection] = None
        try:
            thread.start()
            self._threads.append(thread)
        except RuntimeError:  # the machine has no thread left, or the process ends
            self._forget(connection)
            connection.close()

    def _serve(self, connection: socket.socket, client: str) -> None:
        try:
            with suppress(OSError):  # a client may leave at any time, or never have spoken TLS
                if self._tls is not None:
                    connection = secured = self._replaced(connection, self._tls.wrap(connection))
                    secured.settimeout(_HANDSHAKE_SECONDS)
                    secured.do_handshake()
                Handler(connection, client, self)
        finally:
            self._forget(connection)
            connection.close()

    def _replaced(self, plain: socket.socket, secured: ssl.SSLSocket) -> ssl.SSLSocket:
        with self._lock:
            self._waiting.pop(plain, None)
            self._waiting[secured] = None
        return secured

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(connection, None)
            self._answered.pop(connection, None)


def _listen(address: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.sort(key=lambda each: each[0] != socket.AF_INET)  # localhost is 127.0.0.1 where it is both
    family, _, _, _, place = found[0]
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
            # not the method of an SSLSocket, which takes away what the other thread is using
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


_servers: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _forget_servers() -> None:
    for server in [*_servers]:
        server.forget()


# a forked child (a worker that loads data) would hold the port for as long as it lives
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_servers)

"""The HTTP endpoint of the Prometheus exporter: `/metrics` on a thread of its own."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Callable, Container, Iterable
from threading import Thread
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client.exposition import ThreadingWSGIServer

__all__ = ["MetricsServer"]

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Render = Callable[[bool, "Container[str] | None"], bytes]
"""From (OpenMetrics rather than plain text?, names of the series asked for or None) to an exposition."""


class MetricsServer:
    """Serves what `render` returns until closed; every request has a thread of its own."""

    def __init__(self, address: str, port: int, render: Render) -> None:
        """Bind at once; raises OSError where the address or the port cannot be had."""
        server_class = _Server6 if ":" in address else ThreadingWSGIServer
        self._server = make_server(address, port, _app(render), server_class, handler_class=_SilentHandler)
        # the default, half a second, is how long close() would wait
        self._thread = Thread(
            target=self._server.serve_forever, args=(0.05,), name="moe-telemetry-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use, also where port 0 asked for any."""
        return self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server6(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    timeout = 30  # seconds; a client that sends nothing must not hold its thread for ever

    def log_message(self, *args: object) -> None:
        """Log nothing: scrapes are no news."""


def _app(render: Render) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application for GET, with the formats, the compression and the `name[]` of Prometheus."""

    def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in {"GET", "HEAD"}:
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Length", "0")])
            return []
        if environ["PATH_INFO"] not in {"/", "/metrics"}:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"The metrics are at /metrics\n"]
        openmetrics = "application/openmetrics-text" in environ.get("HTTP_ACCEPT", "")
        names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]")
        body = render(openmetrics, names and frozenset(names))
        headers = [("Content-Type", _OPENMETRICS if openmetrics else _TEXT), ("Vary", "Accept, Accept-Encoding")]
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            # level 1 takes an eighth of the default's time for a sixth more bytes
            body = gzip.compress(body, compresslevel=1)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return answer

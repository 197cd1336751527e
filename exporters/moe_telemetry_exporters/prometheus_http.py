"""One connection to the endpoint: requests are read within limits, answered by a route, and answered in full."""

from __future__ import annotations

import gzip
import io
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from moe_telemetry_exporters.prometheus_accept import accepts_gzip

__all__ = ["Handler", "Reply", "Request", "Route", "Site"]

_logger = logging.getLogger("moe_telemetry")

_IDLE_SECONDS = 120.0
"""How long a connection may wait for its next request: scrapes a minute apart share one."""
_REQUEST_SECONDS = 10.0
"""In which a request has to arrive, from its first byte on; the first of a connection from its opening on."""
_REPLY_SECONDS = 30.0
"""In which a reply has to be taken."""
_MAX_REQUEST_BYTES = 64 * 1024
_MIN_GZIP_BYTES = 512


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a route is asked."""

    path: str
    query: Mapping[str, list[str]]
    """Every value of each parameter, in order."""
    headers: Mapping[str, str]
    """By name, whose case does not matter."""
    client: str
    """Address of who asks."""


@dataclass(frozen=True)
class Reply:
    """What a route answers; compression and the length are the server's business."""

    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further ones."""
    status: int = HTTPStatus.OK
    on_sent: Callable[[], object] | None = None
    """Called once the whole body has been handed to the network."""


Route = Callable[[Request], Reply]
"""Answers the requests for one path, each in a thread of its own; what it raises is answered as an error."""


class Site(Protocol):
    """What a connection has to know of its server."""

    routes: Mapping[str, Route]
    is_closing: bool

    def refusal(self, request: Request) -> Reply | None:
        """Return the answer to who may not ask, None for all others."""

    def answering(self, connection: socket.socket, *, now: bool) -> None:
        """Note that a connection is in the middle of a request, or waits for one."""


class RequestReader(io.RawIOBase):
    """The bytes of a connection; a request that is too slow or too long ends in an error."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._num_bytes = 0
        self._deadline = time.monotonic() + _REQUEST_SECONDS
        self._has_begun = True

    def expect_request(self) -> None:
        """Wait from now on for the first byte of the next request."""
        self._num_bytes = 0
        self._deadline = time.monotonic() + _IDLE_SECONDS
        self._has_begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the base takes any buffer
        """Read what has come, within the limits of the request.

        Raises:
            TimeoutError: the request is not there in time, or is too long to be one.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0 or self._num_bytes > _MAX_REQUEST_BYTES:
            raise TimeoutError
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(buffer)
        self._num_bytes += count
        if not self._has_begun:
            self._has_begun = True
            self._deadline = time.monotonic() + _REQUEST_SECONDS
        return count


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD over one connection until the client, a limit or the server ends it."""

    protocol_version = "HTTP/1.1"
    server_version = "moe-telemetry"
    sys_version = ""
    disable_nagle_algorithm = True  # headers and body are two writes, and the second would wait for an answer
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def __init__(self, connection: socket.socket, client: str, site: Site) -> None:
        self._site = site
        self._reader = RequestReader(connection)
        super().__init__(connection, client, site)  # type: ignore[arg-type]  # all is passed on and nothing is used

    def setup(self) -> None:
        """Read through the limits of a request."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Answer one request."""
        self._site.answering(self.connection, now=False)
        super().handle_one_request()
        self._reader.expect_request()
        if self._site.is_closing:
            self.close_connection = True

    def do_GET(self) -> None:
        """Answer with a route's reply."""
        self._site.answering(self.connection, now=True)
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body that nobody reads would be taken for the next request
        target = urlsplit(self.path)
        request = Request(
            path=target.path,
            query=parse_qs(target.query, keep_blank_values=True),
            headers=self.headers,  # type: ignore[arg-type]  # a Message is a mapping in all that a reader needs
            client=self.client_address,  # type: ignore[arg-type]  # as passed to __init__
        )
        self._send(self._site.refusal(request) or self._reply(request))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Refuse what is neither GET nor HEAD."""
        self.close_connection = True
        self._send(_plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered here", {"Allow": "GET, HEAD"}))

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def _reply(self, request: Request) -> Reply:
        route = self._site.routes.get(request.path)
        if route is None:
            paths = ", ".join(sorted(self._site.routes))
            return _plain(HTTPStatus.NOT_FOUND, f"nothing is here; the paths of this endpoint are {paths}")
        try:
            return route(request)
        except Exception as error:
            _logger.exception("moe_telemetry: the endpoint cannot answer %s", request.path)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, f"this is a fault of moe-telemetry: {type(error).__name__}")

    def _send(self, reply: Reply) -> None:
        body = reply.body
        headers = {"Content-Type": reply.content_type, "Vary": "Accept, Accept-Encoding", **reply.headers}
        if len(body) >= _MIN_GZIP_BYTES and accepts_gzip(self.headers.get("Accept-Encoding", "")):
            # level 1 takes an eighth of the default's time for a sixth more bytes
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        self.connection.settimeout(_REPLY_SECONDS)
        self.send_response(reply.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection or self._site.is_closing:
            self.send_header("Connection", "close")  # which also sets close_connection
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            if reply.on_sent is not None:
                reply.on_sent()

    def log_message(self, *args: object) -> None:
        """Log nothing: scrapes are no news."""


def _plain(status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply("text/plain; charset=utf-8", f"{status.value} {text}\n".encode(), headers or {}, status)

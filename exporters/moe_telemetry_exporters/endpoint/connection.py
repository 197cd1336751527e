"""One connection to the endpoint: requests are read within limits, and answered in full."""

from __future__ import annotations

import gzip
import io
import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Protocol

from moe_telemetry_exporters.endpoint.accept import accepts_gzip
from moe_telemetry_exporters.endpoint.http import Reply, Routes, plain_reply

__all__ = ["Handler", "Host"]

_IDLE_SECONDS = 120.0
"""How long a connection may wait for its next request: scrapes a minute apart share one."""
_REQUEST_SECONDS = 10.0
"""In which a request has to arrive, from its first byte on; the first of a connection from its opening on."""
_REPLY_SECONDS = 30.0
"""In which a reply has to be taken."""
_MAX_REQUEST_BYTES = 64 * 1024
_MIN_GZIP_BYTES = 512


class Host(Protocol):
    """What a connection has to know of its server."""

    routes: Routes
    is_closing: bool

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
    disable_nagle_algorithm = True  # headers and body are two writes, and the second would wait for an answer
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def __init__(self, connection: socket.socket, client: str, host: Host) -> None:
        self._client = client
        self._host = host
        self._reader = RequestReader(connection)
        super().__init__(connection, client, host)  # type: ignore[arg-type]  # the base keeps them and uses none

    def setup(self) -> None:
        """Read through the limits of a request."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Answer one request."""
        self._host.answering(self.connection, now=False)
        super().handle_one_request()
        self._reader.expect_request()
        self.close_connection |= self._host.is_closing

    def do_GET(self) -> None:
        """Answer with a route's reply."""
        self._host.answering(self.connection, now=True)
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body that nobody reads would be taken for the next request
        headers: Mapping[str, str] = self.headers  # type: ignore[assignment]  # a mapping in all that a reader needs
        self._send(self._host.routes.answer(self.path, headers, self._client))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Refuse what is neither GET nor HEAD."""
        self.close_connection = True
        allowed = {"Allow": "GET, HEAD"}
        self._send(plain_reply(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered here", allowed))

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def _send(self, reply: Reply) -> None:
        body = reply.body
        headers = {"Content-Type": reply.content_type, "Vary": "Accept, Accept-Encoding", **reply.headers}
        if len(body) >= _MIN_GZIP_BYTES and accepts_gzip(self.headers.get("Accept-Encoding", "")):
            # level 1 takes an eighth of the default's time for a sixth more bytes
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        headers["Content-Length"] = str(len(body))
        if self.close_connection or self._host.is_closing:
            headers["Connection"] = "close"
        self.connection.settimeout(_REPLY_SECONDS)
        self.send_response(reply.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            if reply.on_sent is not None:
                reply.on_sent()

    def version_string(self) -> str:
        """Return who answers; the version of Python is nobody's business."""
        return "moe-telemetry"

    def log_message(self, *args: object) -> None:
        """Log nothing: scrapes are no news."""

"""From a path to a reply: what a route is asked and answers, and what is answered where no route can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from moe_telemetry_exporters.endpoint.credentials import Credentials

__all__ = ["Reply", "Request", "Route", "Routes", "plain_reply"]

_logger = logging.getLogger("moe_telemetry")
_SECONDS_BETWEEN_LOGS = 60.0
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="moe-telemetry", charset="UTF-8"'}


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
    status: HTTPStatus = HTTPStatus.OK
    on_sent: Callable[[], object] | None = None
    """Called once the whole body has been handed to the network."""


Route = Callable[[Request], Reply]
"""Answers the requests for one path, each in a thread of its own; what it raises is answered as an error."""


class Routes:
    """The routes by path, and the credentials that a request needs; threads may share it."""

    def __init__(self, routes: Mapping[str, Route], credentials: Credentials | None) -> None:
        self._routes = routes
        self._credentials = credentials
        self._last_log = float("-inf")

    def answer(self, target: str, headers: Mapping[str, str], client: str) -> Reply:
        """Return the reply to a request for `target`, a path and perhaps a query."""
        if self._credentials is not None and not self._credentials.match(headers.get("Authorization", "")):
            return plain_reply(HTTPStatus.UNAUTHORIZED, "a user name and a password are needed here", _CHALLENGE)
        try:
            parts = urlsplit(target)
        except ValueError:
            return plain_reply(HTTPStatus.BAD_REQUEST, "this is no path")
        if (route := self._routes.get(parts.path)) is None:
            paths = ", ".join(sorted(self._routes))
            return plain_reply(HTTPStatus.NOT_FOUND, f"nothing is here; the paths of this endpoint are {paths}")
        query = parse_qs(parts.query, keep_blank_values=True)
        try:
            return route(Request(path=parts.path, query=query, headers=headers, client=client))
        except Exception as error:  # noqa: BLE001  # whoever asks is told, and so is the log
            self._log(parts.path, error)
            return plain_reply(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: see the log of the run")

    def _log(self, path: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._last_log >= _SECONDS_BETWEEN_LOGS:
            self._last_log = now
            _logger.error("moe_telemetry: the endpoint cannot answer %s", path, exc_info=error)


def plain_reply(status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None) -> Reply:
    """Return one line for people."""
    return Reply("text/plain; charset=utf-8", f"{status.value} {text}\n".encode(), headers or {}, status)

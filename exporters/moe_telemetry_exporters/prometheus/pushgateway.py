"""PushgatewayExporter: the last snapshot at a Pushgateway, for jobs that are shorter than a scrape.

    mt.watch(model, PushgatewayExporter(url="http://pushgateway:9091"))

One process a node pushes, with its node's share of the counters, to a group of its own.
"""

from __future__ import annotations

import base64
import math
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import ClassVar
from urllib.parse import quote, urlsplit

from moe_telemetry.errors import ConfigError, ExporterError
from moe_telemetry.snapshot import Scope, Snapshot
from moe_telemetry_exporters.endpoint.credentials import Credentials
from moe_telemetry_exporters.prometheus.text import TextRenderer
from moe_telemetry_exporters.settings import check_types

__all__ = ["PushgatewayExporter"]


@dataclass(kw_only=True, eq=False)
class PushgatewayExporter:
    """Replaces what this node has at the Pushgateway; a push that fails is an error, and the next one is tried.

    The Pushgateway keeps the last push of each group until somebody deletes it: by default there is one group a
    node, which the next run on that node takes over.
    """

    scope: ClassVar[Scope] = "node"

    url: str = "http://127.0.0.1:9091"
    """Where the Pushgateway is, with its path prefix if it has one, without user name and password."""
    job: str = "moe-telemetry"
    """The label `job` of the group."""
    instance: str | None = None
    """The label `instance` of the group; by default the host's name, and under torchrun the number of the node."""
    group_by_run: bool = False
    """Give every run a group of its own on each node: for runs that share a node. Somebody has to delete them."""
    delete_at_close: bool = False
    """Delete the group when the run ends, and with it the last numbers of a run shorter than a scrape."""
    interval_seconds: float = 5.0
    """Least time between two pushes; the last snapshot of the run is always pushed."""
    timeout_seconds: float = 10.0
    """Time for one push."""
    cafile: str | os.PathLike[str] | None = None
    """Certificates of the authorities to trust over https; by default those of the machine."""
    username: str | None = None
    """Whom to say we are, with basic authentication."""
    password: str | None = field(default=None, repr=False)
    """Password of `username`."""
    password_file: str | os.PathLike[str] | None = None
    """File with the password instead; it is read at every push."""

    _credentials: Credentials | None = field(init=False, default=None, repr=False)
    _context: ssl.SSLContext | None = field(init=False, default=None, repr=False)
    _renderer: TextRenderer = field(init=False, repr=False, default_factory=TextRenderer)
    _last_push: float = field(init=False, repr=False, default=-math.inf)
    _pending: Snapshot | None = field(init=False, repr=False, default=None)
    _group: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_types(self)
        _check_url(self.url)
        if not self.job:
            raise ConfigError("job='': expected a text that is not empty")
        for name, least in (("interval_seconds", 0.0), ("timeout_seconds", 0.001)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(f"{name}={value!r}: expected a number of seconds, {least:g} or more")
        self._credentials = Credentials.of(self.username, self.password, self.password_file)

    def start(self) -> None:
        """Read what the settings name.

        Raises:
            ExporterError: `cafile` or `password_file` cannot be read.
        """
        if self._credentials is not None:
            self._credentials.header()
        try:
            self._context = ssl.create_default_context(cafile=self.cafile)
        except OSError as error:
            raise ExporterError(f"cafile={self.cafile!r}: {error.strerror}. Expected certificates in PEM") from error

    def export(self, snapshot: Snapshot) -> None:
        """Push `snapshot`, or keep it for later where the last push was just now.

        Raises:
            ExporterError: the Pushgateway did not take it.
        """
        self._pending = snapshot
        if snapshot.health.run_finished or time.monotonic() - self._last_push >= self.interval_seconds:
            self._push(snapshot)

    def close(self) -> None:
        """Push what is kept, or delete the group where that was asked.

        Raises:
            ExporterError: the Pushgateway did not take it.
        """
        pending, self._pending = self._pending, None
        if self.delete_at_close and self._group is not None:
            group, self._group = self._group, None
            self._send("DELETE", group, None)
        elif pending is not None and not self.delete_at_close:
            self._push(pending)

    def _push(self, snapshot: Snapshot) -> None:
        self._pending = None
        self._last_push = time.monotonic()  # also of one that fails: a gateway in trouble gets no more than others
        self._group = self._group_of(snapshot)
        self._send("PUT", self._group, self._renderer.render(snapshot, openmetrics=False))

    def _group_of(self, snapshot: Snapshot) -> str:
        labels = {"job": self.job, "instance": self.instance or _this_node()}
        if self.group_by_run:
            labels["run"] = snapshot.run
        return "/".join(_path_of(name, value) for name, value in labels.items())

    def _send(self, method: str, group: str, body: bytes | None) -> None:
        target = f"{self.url.rstrip('/')}/metrics/{group}"
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "User-Agent": "moe-telemetry"}
        if self._credentials is not None:
            headers["Authorization"] = self._credentials.header()
        request = urllib.request.Request(target, body, headers, method=method)  # noqa: S310  # checked: http or https
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_seconds, context=self._context):  # noqa: S310
                pass
        except urllib.error.HTTPError as error:
            said = _text_of(error)
            raise ExporterError(f"{method} {target}: the Pushgateway answers {error.code} {said}") from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ExporterError(f"{method} {target}: {reason}. Is MOE_TELEMETRY_PUSHGATEWAY_URL right?") from error


def _text_of(refusal: urllib.error.HTTPError) -> str:
    with refusal, suppress(OSError, HTTPException):  # a server may refuse and hang up
        return refusal.read(500).decode(errors="replace").strip()
    return ""


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if "@" in url:  # never shown: what stands before it is a secret
        raise ConfigError("url: expected no user in it; set username, and password or password_file")
    if not is_good or parts.query or parts.fragment:
        raise ConfigError(f"url={url!r}: expected http:// or https://, a host, a port, and perhaps a path")


def _this_node(environ: Mapping[str, str] | None = None) -> str:
    """Return a name that no other node of the job has: two launches on one host are two nodes."""
    variables = os.environ if environ is None else environ
    return "/".join(filter(None, (socket.gethostname(), variables.get("GROUP_RANK"))))


def _path_of(name: str, value: str) -> str:
    """Return a label of the group as it stands in the path."""
    if value not in {"", ".", ".."} and "/" not in value:  # those would be taken for parts of the path
        return f"{name}/{quote(value, safe='', errors='replace')}"
    return f"{name}@base64/{base64.urlsafe_b64encode(value.encode(errors='replace')).decode() or '='}"

"""Where `moe-telemetry watch` gets its data: `/live.json` of an endpoint, by HTTP or HTTPS."""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import ssl
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from moe_telemetry.errors import ConfigError, TelemetryError

__all__ = ["LIVE_SCHEMA", "Document", "EndpointError", "Source"]

Document = Mapping[str, Any]

LIVE_SCHEMA = 1
_TIMEOUT_SECONDS = 10
_MAX_BYTES = 64 * 2**20
_VARIABLES = "MOE_TELEMETRY_PROMETHEUS_"
"""The endpoint's own settings: in the environment of the job, its user and password are there already."""
_PATHS = ("/metrics", "/live.json")
_ALWAYS = frozenset({"state", "now"})
_WITH_LAYERS = frozenset({"run", "step", "world_size", "alerts", "health", "stage", "stages", "load_percent", "curves"})
"""What a document has, and what one with layers has besides."""


class EndpointError(TelemetryError):
    """The endpoint does not answer, or not with what there is to watch."""


class Source:
    """An endpoint; `url` is what a person would give, without a path or with that of the metrics."""

    def __init__(
        self,
        url: str,
        *,
        stage: str | None = None,
        layer: str | None = None,
        insecure: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Read the address, and the user and password in it, or else those in the endpoint's own variables.

        Raises:
            ConfigError: it is no address of an endpoint.
        """
        parts = _split(url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        port = f":{parts.port}" if parts.port is not None else ""
        path = next((parts.path.removesuffix(end) for end in _PATHS if parts.path.endswith(end)), parts.path)
        self.url = f"{parts.scheme}://{host}{port}{path.rstrip('/')}/"
        """The page's address, without user and password."""
        chosen = {name: value for name, value in (("stage", stage), ("layer", layer)) if value is not None}
        self._query = f"?{urlencode(chosen)}" if chosen else ""
        self._headers = {"Accept": "application/json"}
        if pair := _of_address(parts) or _of_environment(os.environ if environ is None else environ):
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        handlers: list[Any] = [_Redirects()]
        if insecure:
            handlers.append(HTTPSHandler(context=_trusting_all()))
        if _is_this_machine(parts.hostname or ""):
            # a proxy for the world outside would look for the endpoint on its own machine
            handlers.append(ProxyHandler({}))
        self._opener = build_opener(*handlers)

    def fetch(self) -> Document:
        """Return what there is to see now.

        Raises:
            EndpointError: there is no answer, or another one.
        """
        request = Request(f"{self.url}live.json{self._query}", headers=self._headers)  # noqa: S310  # http or https: see _split
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
                body = response.read(_MAX_BYTES)
        except HTTPError as error:
            said = str(error.reason).partition("\n")[0]
            raise EndpointError(f"{self.url} answers {error.code} {said}: {_advice(error.code)}") from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise EndpointError(
                f"no endpoint at {self.url} ({_short(reason)}): is the run up, with a Prometheus exporter on that port?"
            ) from error
        return self._document(body)

    def _document(self, body: bytes) -> Document:
        try:
            document = json.loads(body)
            schema = document["schema"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EndpointError(f"{self.url}live.json is not what moe-telemetry serves: {body[:60]!r}") from error
        if schema != LIVE_SCHEMA:
            raise EndpointError(f"{self.url} speaks schema {schema!r}, this version {LIVE_SCHEMA}: install the run's")
        if missing := (_ALWAYS | _WITH_LAYERS if "layers" in document else _ALWAYS) - document.keys():
            raise EndpointError(f"{self.url}live.json is not whole: {', '.join(sorted(missing))} missing")
        return dict(document)


class _Redirects(HTTPRedirectHandler):
    """Follows an endpoint that has moved, and tells the password to no other host."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:  # noqa: ANN401  # as in the base class
        moved = super().redirect_request(req, fp, code, msg, headers, newurl)
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        is_same = before.hostname == after.hostname and (before.scheme, after.scheme) != ("https", "http")
        if moved is not None and not is_same:
            moved.remove_header("Authorization")
        return moved


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if _is_address(parts):
            return parts
    except ValueError:  # of a bracket, a port, or a name that no host can have
        pass
    scheme, separator, _ = url.rpartition("@")[0].rpartition("://")
    shown = f"{scheme}{separator}...@{url.rpartition('@')[2]}" if "@" in url else url
    raise ConfigError(f"{shown!r}: expected the address of an endpoint, as in 127.0.0.1:9464 or https://node7:9464")


def _is_address(parts: SplitResult) -> bool:
    host = parts.hostname or ""
    host.encode("idna")
    has_space = any(char.isspace() for char in host + parts.path)
    return parts.scheme in {"http", "https"} and host != "" and parts.port != 0 and not has_space


def _of_address(parts: SplitResult) -> str | None:
    return None if parts.username is None else f"{unquote(parts.username)}:{unquote(parts.password or '')}"


def _of_environment(environ: Mapping[str, str]) -> str | None:
    user, password = environ.get(f"{_VARIABLES}USERNAME"), environ.get(f"{_VARIABLES}PASSWORD", "")
    if user is not None and (path := environ.get(f"{_VARIABLES}PASSWORD_FILE")) is not None:
        password = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    return None if user is None else f"{user}:{password}"


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _trusting_all() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _advice(status: int) -> str:
    if status in {401, 403}:
        return f"give user and password in the URL, https://USER:PASSWORD@host, or as {_VARIABLES}USERNAME and PASSWORD"
    if status == 404:
        return "is it the endpoint of moe-telemetry, and of this version?"
    return "see the trainer's log"


def _short(reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"{reason.verify_message}; --insecure goes on without a check"
    if isinstance(reason, ssl.SSLError) and reason.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS; http:// instead"
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return " ".join(text.split())

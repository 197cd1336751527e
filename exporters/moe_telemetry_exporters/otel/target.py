"""Which OTLP receiver, and how: from settings and the standard variables, with what no message may show."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.util.re import parse_env_headers

from moe_telemetry.errors import ConfigError, ExporterError

__all__ = ["GRPC", "HTTP", "PACKAGES", "Target", "otlp_variable"]

GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"

PACKAGES: Mapping[str, str] = {
    GRPC: "opentelemetry.exporter.otlp.proto.grpc",
    HTTP: "opentelemetry.exporter.otlp.proto.http",
}
"""The import package of each protocol's exporter."""

_DEFAULT_ENDPOINTS: Mapping[str, str] = {GRPC: "http://localhost:4317", HTTP: "http://localhost:4318"}
_GRPC_PORT = 4317
# short, since what one export does not bring the next one does, and a run's end waits for the last
_DEFAULT_TIMEOUT_SECONDS = 2.0
_SHORTEST_SECRET = 4


@dataclass(frozen=True, kw_only=True)
class Target:
    """A receiver, from settings and the standard `OTEL_EXPORTER_OTLP_*` variables.

    Raises:
        ConfigError: a setting is wrong.
    """

    protocol: str
    stated_endpoint: str | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    timeout_seconds: float

    @classmethod
    def of(
        cls, *, endpoint: str | None, protocol: str | None, headers: Mapping[str, str], timeout_seconds: float | None
    ) -> Target:
        """Return the target of these settings; what is None comes from the environment."""
        stated = None if endpoint is None else _checked_endpoint(endpoint)
        protocol = protocol or otlp_variable("PROTOCOL") or _usual_protocol(stated or otlp_variable("ENDPOINT"))
        if protocol not in PACKAGES:
            raise ConfigError(f"protocol={protocol!r}: expected {GRPC!r} or {HTTP!r}")
        if stated is not None and protocol == HTTP and urlsplit(stated).path in {"", "/"}:
            stated = f"{stated.rstrip('/')}/v1/metrics"
        # lower case: gRPC takes no other names
        lower = {name.strip().lower(): value for name, value in headers.items()}
        timeout = _checked_timeout(timeout_seconds)
        return cls(protocol=protocol, stated_endpoint=stated, headers=lower, timeout_seconds=timeout)

    def load(self) -> ModuleType:
        """Import the SDK's exporter of this protocol.

        Raises:
            ExporterError: its package is not installed.
        """
        try:
            return import_module(f"{PACKAGES[self.protocol]}.metric_exporter")
        except ModuleNotFoundError as error:
            package = f"opentelemetry-exporter-otlp-proto-{self.protocol.partition('/')[0]}"
            raise ExporterError(
                f"exporting by {self.protocol} needs the package {package}: pip install 'moe-telemetry[otel]'"
            ) from error

    @property
    def shown(self) -> str:
        """The receiver as messages name it: without its path, which is a secret with some vendors."""
        parts = urlsplit(self._endpoint)
        if not parts.netloc:  # no URL: a variable, for the setting is checked
            return f"the receiver of OTEL_EXPORTER_OTLP_ENDPOINT ({self.protocol})"
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]} ({self.protocol})"

    @property
    def secrets(self) -> Sequence[str]:
        """Words that no message may hold: of headers, and of what follows the receiver's name."""
        parts = urlsplit(self._endpoint)
        headers = parse_env_headers(otlp_variable("HEADERS") or "", liberal=True)
        path = parts.path if parts.path not in {"", "/", "/v1/metrics"} else ""
        found = [*self.headers.values(), *headers.values(), parts.netloc.rpartition("@")[0], path, parts.query]
        # word by word, since messages quote a text in their own ways
        words = (word for text in found for word in re.split(r"[^!-~]+", text))
        return sorted((word for word in words if len(word) >= _SHORTEST_SECRET), key=len, reverse=True)

    @property
    def _endpoint(self) -> str:
        return self.stated_endpoint or otlp_variable("ENDPOINT") or _DEFAULT_ENDPOINTS[self.protocol]


def otlp_variable(name: str) -> str | None:
    """Return the text of `OTEL_EXPORTER_OTLP_METRICS_<name>`, or of the variable for all signals."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_METRICS_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")


def _usual_protocol(endpoint: str | None) -> str:
    return GRPC if endpoint is not None and _port(endpoint) == _GRPC_PORT else HTTP


def _port(endpoint: str) -> int | None:
    """Return the port of a URL; -1 for one that is no number."""
    try:
        return urlsplit(endpoint).port
    except ValueError:
        return -1


def _checked_endpoint(endpoint: str) -> str:
    # what follows it is a secret with some vendors
    beginning = re.split(r"(?<=[^:/])[/?#]|(?<=://)[/?#]", endpoint, maxsplit=1)[0]
    if "@" in beginning:
        raise ConfigError("endpoint has a user or password in it: give it as a header, which is never shown")
    if not beginning.startswith(("http://", "https://")) or not _has_host(beginning):
        raise ConfigError(f"endpoint={beginning!r}: expected a URL such as 'http://localhost:4318'")
    return endpoint


def _has_host(url: str) -> bool:
    try:
        return bool(urlsplit(url).hostname) and _port(url) != -1
    except ValueError:  # half of an address in brackets
        return False


def _checked_timeout(seconds: float | None) -> float:
    text = otlp_variable("TIMEOUT") if seconds is None else repr(seconds)
    try:
        found = _DEFAULT_TIMEOUT_SECONDS if text is None else float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ConfigError(f"timeout_seconds={text}: expected seconds above 0")
    return found

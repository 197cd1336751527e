"""The connection to an OTLP receiver: the SDK's own exporter, with the reason of each failure."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData

from moe_telemetry.errors import ExporterError
from moe_telemetry_exporters.otel.target import GRPC, HTTP, PACKAGES, Target

__all__ = ["Connection"]

_LOGGERS: Mapping[str, str] = {GRPC: f"{PACKAGES[GRPC]}.exporter", HTTP: f"{PACKAGES[HTTP]}.metric_exporter"}
_LONGEST_ANSWER = 200


class Connection:
    """Sends points to one receiver."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._answers: list[str] = []
        self._was_redirected = False
        self._session = _session(self._note_answer) if target.protocol == HTTP else None
        options = {} if self._session is None else {"session": self._session}
        self._exporter = target.load().OTLPMetricExporter(
            endpoint=target.stated_endpoint,
            headers=dict(target.headers) or None,
            timeout=target.timeout_seconds,
            **options,
        )

    def send(self, data: MetricsData) -> str:
        """Send points, within about the timeout; the SDK tries again where that may help.

        Returns:
            What the receiver says about points that it refuses for good; empty where it has taken all.

        Raises:
            ExporterError: the receiver does not have them.
        """
        self._answers.clear()
        self._was_redirected = False
        with _log_of(_LOGGERS[self._target.protocol]) as messages:
            try:
                result = self._exporter.export(data)
            except Exception as error:  # noqa: BLE001  # gRPC and requests refuse headers in their own ways
                # not chained: the cause may quote a header
                raise self._failure([f"{type(error).__name__}: {error}"]) from None
        # the SDK takes a redirect, which it does not follow, for a success
        if result is not MetricExportResult.SUCCESS or self._was_redirected:
            raise self._failure([*self._answers, *messages])
        return self._shown("; ".join(self._answers))

    def close(self) -> None:
        """Close the connection."""
        with _log_of(_LOGGERS[self._target.protocol]):
            self._exporter.shutdown()
        if self._session is not None:
            self._session.close()

    def _note_answer(self, response: Any, *_: object, **__: object) -> None:  # noqa: ANN401  # of requests
        """Keep what an HTTP receiver says, which the SDK's exporter drops."""
        self._was_redirected = 300 <= response.status_code < 400
        if response.status_code >= 300:
            text = " ".join(response.text.split())[:_LONGEST_ANSWER]
            self._answers.append(f"HTTP {response.status_code} {response.reason} {text}".rstrip())
            return
        self._answers.clear()
        if rejected := _rejection(response.content):
            self._answers.append(rejected)

    def _failure(self, reasons: Sequence[str]) -> ExporterError:
        told = self._shown("; ".join(dict.fromkeys(reasons)) or "no reason given")
        return ExporterError(f"{self._target.shown} did not take the metrics: {told}")

    def _shown(self, text: str) -> str:
        for secret in self._target.secrets:
            text = text.replace(secret, "***")
        return text


def _session(note_answer: Any) -> Any:  # noqa: ANN401  # of requests, which only HTTP needs
    session = import_module("requests").Session()
    session.hooks["response"].append(note_answer)
    return session


def _rejection(answer: bytes) -> str:
    """Return why a receiver refused a part of a request, which it answers with a success."""
    try:
        partial = ExportMetricsServiceResponse.FromString(answer).partial_success
    except Exception:  # noqa: BLE001  # some receivers answer with JSON or text
        return ""
    num_rejected = partial.rejected_data_points
    return f"{num_rejected} points refused: {partial.error_message}" if num_rejected else ""


@contextmanager
def _log_of(name: str) -> Iterator[list[str]]:
    """Take what this thread logs there: it is the reason of a failure, and is told once, by our own error."""
    messages: list[str] = []
    thread = threading.get_ident()

    def is_for_others(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return True
        messages.append(record.getMessage())
        return False

    logger = logging.getLogger(name)
    # before the SDK's own filter, which hides a message that it has seen in the last minutes
    logger.filters.insert(0, is_for_others)
    try:
        yield messages
    finally:
        logger.filters.remove(is_for_others)

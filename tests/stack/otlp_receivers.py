"""OTLP receivers of real sockets and real encoding, by HTTP and gRPC, that can be told to fail."""

from __future__ import annotations

import gzip
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric as Message

from moe_telemetry.catalog import METRICS

Key = tuple[str, frozenset[tuple[str, str]]]

NAMES = {row.otel_name: row.name for row in METRICS.values()}
DELTA, CUMULATIVE = 1, 2
HANG_SECONDS = 1.5
PROTOCOLS = ("grpc", "http/protobuf")


class Received:
    """What a receiver has, as a store of metrics would keep it."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.sizes: list[int] = []
        self.headers: list[Mapping[str, str]] = []
        self.answers: deque[Any] = deque()
        """What to answer to the next requests: a status, `"close"`, `"hang"`, or a rejection; then success."""
        self.num_asked = 0

    def add(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.requests.append(ExportMetricsServiceRequest.FromString(body))
        self.sizes.append(len(body))
        self.headers.append(headers)

    def next_answer(self) -> Any:
        self.num_asked += 1
        return self.answers.popleft() if self.answers else None

    def metrics(self) -> Iterator[Message]:
        for request in self.requests:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    assert scope.scope.name == "moe_telemetry"
                    yield from scope.metrics

    @property
    def num_points(self) -> int:
        return sum(len(_data(message)[0]) for message in self.metrics())

    def resources(self) -> list[dict[str, str]]:
        found = [_attributes(part.resource) for request in self.requests for part in request.resource_metrics]
        return [one for place, one in enumerate(found) if one not in found[:place]]

    def last(self, num_requests: int = 1) -> Received:
        """What came in the last requests alone."""
        found = Received()
        found.requests = self.requests[-num_requests:]
        return found

    def values(self) -> dict[Key, float]:
        """Every series by its name in Prometheus: the last value, or the sum of deltas."""
        found: dict[Key, float] = {}
        for message in self.metrics():
            is_delta = _data(message)[1] == DELTA
            for key, value in _samples(message):
                found[key] = value + (found.get(key, 0) if is_delta else 0)
        return found

    def points(self, name: str) -> list[Any]:
        """All points of a metric, in the order in which they came."""
        return [point for message in self.metrics() if message.name == name for point in _data(message)[0]]


def _data(message: Message) -> tuple[Any, int]:
    kind = message.WhichOneof("data")
    assert kind is not None
    data = getattr(message, kind)
    return data.data_points, getattr(data, "aggregation_temporality", 0)


def _samples(message: Message) -> Iterator[tuple[Key, float]]:
    name = NAMES[message.name]
    for point in _data(message)[0]:
        labels = _attributes(point)
        if message.WhichOneof("data") != "histogram":
            yield (name, frozenset(labels.items())), getattr(point, point.WhichOneof("value"))
            continue
        bounds = [*map(repr, point.explicit_bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(point.bucket_counts), strict=True):
            yield (f"{name}_bucket", frozenset({**labels, "le": bound}.items())), count
        yield (f"{name}_sum", frozenset(labels.items())), point.sum
        yield (f"{name}_count", frozenset(labels.items())), point.count


def _attributes(holder: Any) -> dict[str, str]:
    return {item.key: item.value.string_value for item in holder.attributes}


@contextmanager
def receiver(protocol: str, port: int = 0) -> Iterator[tuple[Received, str]]:
    """Run a receiver, and yield what it gets and the URL where it listens."""
    with _grpc_receiver(port) if protocol == "grpc" else _http_receiver(port) as found:
        yield found


@contextmanager
def _http_receiver(port: int) -> Iterator[tuple[Received, str]]:
    received = Received()

    class Handler(_Handler):
        sink = received

    server = _HttpServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield received, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        server.pool.shutdown(cancel_futures=True)


class _HttpServer(HTTPServer):
    """Serves a few connections at a time, by threads that are there before and after."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pool = _started_pool()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.pool.submit(self._serve, request, client_address)

    def _serve(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):
            self.finish_request(request, client_address)
        self.shutdown_request(request)


def _started_pool() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(3)
    all_started = threading.Barrier(4)
    for _ in range(3):
        pool.submit(all_started.wait)
    all_started.wait()
    return pool


class _Handler(BaseHTTPRequestHandler):
    sink: Received
    protocol_version = "HTTP/1.1"
    timeout = 1.0  # a client closes its idle connections when their objects are collected

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.sink.next_answer()
        if answer == "close":
            # a reset, as a process that is killed leaves it
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        if answer == "hang":
            time.sleep(HANG_SECONDS)
            self.close_connection = True
            return
        if isinstance(answer, tuple):
            self._answer(answer[0], b"no room", answer[1])
            return
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/metrics"
        self.sink.add(body, {name.lower(): value for name, value in self.headers.items()})
        response = answer if isinstance(answer, ExportMetricsServiceResponse) else ExportMetricsServiceResponse()
        self._answer(200, response.SerializeToString(), {"Content-Type": "application/x-protobuf"})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _grpc_receiver(port: int) -> Iterator[tuple[Received, str]]:
    received = Received()
    server = grpc.server(_started_pool(), options=[("grpc.so_reuseport", 0)])
    add_MetricsServiceServicer_to_server(_Servicer(received), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield received, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class _Servicer(MetricsServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> ExportMetricsServiceResponse:
        answer = self._received.next_answer()
        if answer == "hang":
            time.sleep(HANG_SECONDS)
        if answer in ("close", "hang"):
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        if isinstance(answer, tuple):
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if answer[0] == 429 else grpc.StatusCode.INTERNAL
            context.abort(status, "no room")
        self._received.add(request.SerializeToString(), dict(context.invocation_metadata()))
        return ExportMetricsServiceResponse()

"""What an export by OTLP costs, at 61 layers of 256 experts: CPU, bytes and requests.

python benchmarks/export_otel.py

Medians over rounds. The receiver is a process of its own that reads requests and answers; the CPU time is
that of the exporting process, all of it in the exporter's thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import grpc

from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.otel import OtelExporter

PROTOCOLS = ("http/protobuf", "grpc")
EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


def measure(url: str, protocol: str, sizes: Connection, *, per_expert: bool, rounds: int) -> tuple[float, list[int]]:
    """Return milliseconds of CPU of an export, and the sizes of its requests."""
    exporter = OtelExporter(endpoint=url, protocol=protocol, timeout_seconds=30)
    exporter.start()
    times, found = [], []
    for step in range(1, rounds + 1):
        snapshot = make_snapshot(step=step, num_layers=61, num_experts=256, per_expert=per_expert)
        started = time.process_time()
        exporter.export(snapshot)
        times.append((time.process_time() - started) * 1e3)
        found = [sizes.recv()]
        while sizes.poll(0.05):
            found.append(sizes.recv())
    exporter.close()
    return statistics.median(times), found


@contextmanager
def receiver(protocol: str) -> Iterator[tuple[str, Connection]]:
    """Run a receiver in a process; it says how many bytes each request has."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=receive, args=(protocol, theirs), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{ours.recv()}", ours
    process.terminate()
    process.join()


def receive(protocol: str, sizes: Connection) -> None:
    """Answer every request, without reading what is in it."""
    if protocol == "grpc":
        _receive_by_grpc(sizes)
    else:
        _receive_by_http(sizes)


def _receive_by_grpc(sizes: Connection) -> None:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  # of the receiver's process alone

    def take(request: bytes, _: Any) -> bytes:  # noqa: ANN401  # a context of gRPC
        sizes.send(len(request))
        return b""

    handlers = {"Export": grpc.unary_unary_rpc_method_handler(take)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT.split("/")[1], handlers),))
    sizes.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


def _receive_by_http(sizes: Connection) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sizes.send(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    sizes.send(server.server_port)
    server.serve_forever()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    for protocol in PROTOCOLS:
        for name, per_expert in (("default set", False), ("with per-expert series", True)):
            with receiver(protocol) as (url, sizes):
                cpu_ms, found = measure(url, protocol, sizes, per_expert=per_expert, rounds=rounds)
            print(
                f"61 layers x 256 experts, {name}, {protocol}: {cpu_ms:.0f} ms of CPU an export, "
                f"{sum(found):,} bytes in {len(found)} requests, the largest {max(found):,}"
            )


if __name__ == "__main__":
    main()

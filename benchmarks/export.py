"""What an export costs the training thread, and a scrape the endpoint, at 61 layers.

python benchmarks/export.py

Medians over rounds in one run. The training thread hands the snapshot over; all else happens in the
exporters' own threads. The CPU time of a scrape is that of the whole process while it answers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import urllib.request

from moe_telemetry.delivery import Delivery
from moe_telemetry.plugins import resolve_exporter
from moe_telemetry.testing import make_snapshot

EXPORTERS = ("prometheus", "tensorboard", "jsonl")


def hand_over_ms(*, per_expert: bool, rounds: int) -> float:
    """Return the training thread's milliseconds for one export to all sinks."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOE_TELEMETRY_PROMETHEUS_PORT"] = "0"
        os.environ["MOE_TELEMETRY_TENSORBOARD_LOGDIR"] = folder
        os.environ["MOE_TELEMETRY_JSONL_PATH"] = f"{folder}/log.jsonl"
        delivery = Delivery([resolve_exporter(name) for name in EXPORTERS])
        times = []
        for step in range(1, rounds + 1):
            snapshot = make_snapshot(step=step, num_layers=61, num_experts=256, per_expert=per_expert)
            started = time.perf_counter()
            delivery.put(snapshot)
            times.append((time.perf_counter() - started) * 1e3)
            time.sleep(0.05)
        delivery.close(30)
    return statistics.median(times)


def scrape(*, per_expert: bool, rounds: int) -> tuple[float, int, int]:
    """Return CPU milliseconds, bytes and series of one scrape, without gzip."""
    os.environ["MOE_TELEMETRY_PROMETHEUS_PORT"] = "0"
    _, exporter = resolve_exporter("prometheus")
    exporter.start()  # type: ignore[attr-defined]
    exporter.export(make_snapshot(num_layers=61, num_experts=256, per_expert=per_expert))
    times, body = [], b""
    for _ in range(rounds):
        started = time.process_time()
        with urllib.request.urlopen(exporter.url) as response:  # type: ignore[attr-defined]  # noqa: S310  # our own
            body = response.read()
        times.append((time.process_time() - started) * 1e3)
    exporter.close()
    return statistics.median(times), len(body), sum(not line.startswith(b"#") for line in body.splitlines())


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    for name, per_expert in (("default set", False), ("with per-expert series", True)):
        handed = hand_over_ms(per_expert=per_expert, rounds=rounds)
        cpu_ms, num_bytes, num_series = scrape(per_expert=per_expert, rounds=rounds)
        print(
            f"61 layers x 256 experts, {name}: training thread {handed:.3f} ms an export; "
            f"scrape {cpu_ms:.1f} ms of CPU, {num_bytes:,} bytes, {num_series:,} series"
        )


if __name__ == "__main__":
    main()

"""What the live page costs at 61 layers of 256 experts: an export, and a look at it.

python benchmarks/live_view.py

Medians of CPU milliseconds of the whole process, over an hour of exports. An export is the exporter's own thread's;
the training thread only hands the snapshot over (benchmarks/export.py).
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

from moe_telemetry.snapshot import Snapshot
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.live import LiveView

__all__ = ["main"]

_NUM_SEEDS = 24  # more layers than the statistics of loads are remembered for


class Clock:
    """An hour passes at once."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def _cpu_ms(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return (time.process_time() - started) * 1e3


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exports", type=int, default=1000)
    num_exports = parser.parse_args().exports
    snapshots = [_snapshot(seed) for seed in range(_NUM_SEEDS)]
    clock = Clock()
    view = LiveView(clock)
    tracemalloc.start()
    _show(view, clock, snapshots, num_exports)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    exports = _show(view, clock, snapshots, num_exports)
    looks = [_cpu_ms(lambda: _answer(view)) for _ in range(21)]
    body = _answer(view)
    print(
        f"61 layers x 256 experts: export {statistics.median(exports):.1f} ms, look {statistics.median(looks):.1f} ms; "
        f"{len(body):,} bytes, {len(gzip.compress(body, compresslevel=1)):,} with gzip; {held / 1e6:.1f} MB held"
    )


def _snapshot(seed: int) -> Snapshot:
    return make_snapshot(
        num_layers=61,
        num_experts=256,
        top_k=8,
        tokens_per_step=4096,
        replayed=True,
        stages=("train", "eval"),
        seed=seed,
    )


def _show(view: LiveView, clock: Clock, snapshots: list[Snapshot], num_exports: int) -> list[float]:
    times = []
    for number in range(num_exports):
        clock.now += 3600 / num_exports
        snapshot = replace(snapshots[number % len(snapshots)], time=clock.now)
        times.append(_cpu_ms(lambda snapshot=snapshot: view.show(snapshot)))  # type: ignore[misc]
    return times


def _answer(view: LiveView) -> bytes:
    return json.dumps(view.document(layer="decoder.3"), separators=(",", ":")).encode()


if __name__ == "__main__":
    main()

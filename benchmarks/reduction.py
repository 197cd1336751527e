"""What a reduction costs, against a bare all-reduce of the same bytes and against one all-reduce a layer.

python benchmarks/reduction.py --ranks 2 4

Medians over rounds on gloo ranks of this machine, 61 layers of 256 experts. `rendezvous` is the check
that all ranks have come, which a bare all-reduce does not make.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import moe_telemetry as mt
from moe_telemetry.testing import run_ranks

NUM_LAYERS, NUM_EXPERTS = 61, 256


def median_ms(action: Callable[[], object], rounds: int) -> float:
    """Return the median milliseconds of a collective action, all ranks together."""
    times = []
    for _ in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        action()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def measure(_rank: int, rounds: int) -> dict[str, float]:
    """Return the figures of one rank."""
    routers = {f"decoder.{layer}": mt.RouterSpec(num_experts=NUM_EXPERTS, top_k=8) for layer in range(NUM_LAYERS)}
    with mt.watch(torch.nn.Linear(1, 1), routers=routers, scores=False) as monitor:
        ids = torch.randint(0, NUM_EXPERTS, (512, 8))
        for key in monitor.routers:
            monitor.observe(key, ids)
        monitor.snapshot()
        reducer = monitor._reporting.reducer  # noqa: SLF001
        size = sum(reducer._packing._sizes)  # noqa: SLF001  # type: ignore[union-attr]
        packed, small = torch.zeros(size, dtype=torch.int64), torch.zeros(size // NUM_LAYERS, dtype=torch.int64)
        names = iter(range(10**6))
        return {
            "bytes": size * 8.0,
            "bare": median_ms(lambda: dist.all_reduce(packed), rounds),
            "rendezvous": median_ms(lambda: reducer._ranks.meet(f"bench/{next(names)}", 60), rounds),  # noqa: SLF001
            "snapshot": median_ms(monitor.snapshot, rounds),
            "per layer": median_ms(lambda: [dist.all_reduce(small) for _ in range(NUM_LAYERS)], rounds),
        }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    for num_ranks in arguments.ranks:
        figures = run_ranks(measure, num_ranks, arguments.rounds)[0]
        print(f"{num_ranks} ranks: " + ", ".join(f"{name} {value:,.2f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()

"""Rows a second of `compare_routes`, against a straightforward implementation by broadcasting.

    python benchmarks/compare_routes.py [--threads 1] [--rounds 15] [--rows 8192]

All figures come from one run, the candidates taking turns; medians. With one thread, CPU time is
measured, so that other work on the machine shows little; with more, wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moe_telemetry.replay import compare_routes

SHAPES = ((128, 8), (512, 8), (512, 22))


def broadcast(replayed_TK: Tensor, own_TK: Tensor, num_experts: int) -> Tensor:
    """Count the same classes and overlaps the obvious way: `[T, K, K]` comparisons and a sort."""
    negative_TK = replayed_TK < 0
    missing_T, malformed_T = negative_TK.all(1), negative_TK.any(1)
    out_of_range_T = (replayed_TK >= num_experts).any(1)
    sorted_TK = replayed_TK.sort(1).values
    repeated_T = (sorted_TK[:, 1:] == sorted_TK[:, :-1]).any(1)
    copies_T = torch.zeros_like(missing_T)
    copies_T[1:] = (replayed_TK[1:] == replayed_TK[:-1]).all(1)
    unusable_T = malformed_T | out_of_range_T | repeated_T
    checked_T = ~unusable_T & ~copies_T
    shared_T = (replayed_TK[:, :, None] == own_TK[:, None, :]).any(2).sum(1)
    kinds = (
        missing_T,
        malformed_T & ~missing_T,
        out_of_range_T & ~malformed_T,
        repeated_T & ~out_of_range_T & ~malformed_T,
        copies_T & ~unusable_T,
        checked_T,
        checked_T & (shared_T == 0),
    )
    return torch.stack([*(kind.sum() for kind in kinds), (shared_T * checked_T).sum()])


def make_routes(rows: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Return own routes, and replayed ones that differ by rounding, as int64 `[T, K]`."""
    scores_TE = torch.randn(rows, num_experts)
    noisy_TE = scores_TE + 0.02 * torch.randn_like(scores_TE)
    return noisy_TE.topk(top_k).indices, scores_TE.topk(top_k).indices


def measure(candidates: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median seconds of each candidate; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 3):
        for name, run in candidates.items():
            begin = clock()
            run()
            if turn >= 3:
                seconds[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=8192)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), {arguments.rows} rows, int64 ids")
    print(f"{'E':>5} {'K':>3} {'top-k':>13} {'broadcast':>13} {'compare_routes':>15}  ratio   (rows a second)")
    for num_experts, top_k in SHAPES:
        replayed_TK, own_TK = make_routes(arguments.rows, num_experts, top_k)
        scores_TE = torch.randn(arguments.rows, num_experts)
        kinds = compare_routes(replayed_TK, own_TK, num_experts=num_experts).vector
        counted = kinds[1:9]  # from missing to shared experts
        if not torch.equal(counted, broadcast(replayed_TK, own_TK, num_experts)):
            raise SystemExit(f"E={num_experts}, K={top_k}: the two do not count the same")
        seconds = measure(
            {
                "topk": lambda: scores_TE.topk(top_k),  # noqa: B023  # used within the turn
                "broadcast": lambda: broadcast(replayed_TK, own_TK, num_experts),  # noqa: B023
                "ours": lambda: compare_routes(replayed_TK, own_TK, num_experts=num_experts),  # noqa: B023
            },
            arguments.rounds,
            clock,
        )
        topk, plain, ours = (arguments.rows / seconds[name] for name in ("topk", "broadcast", "ours"))
        print(f"{num_experts:>5} {top_k:>3} {topk:>13,.0f} {plain:>13,.0f} {ours:>15,.0f}  {ours / plain:>4.1f}x")


if __name__ == "__main__":
    main()

"""What diagnostics and score statistics cost, against the router and the MoE layer that they watch.

    python benchmarks/diagnostics.py [--threads 1] [--rounds 9]

All figures of a table come from one run, the candidates taking turns; medians. With one thread, CPU time
is measured, so that other work on the machine shows little; with more, wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_telemetry.diagnostics import build_router_diagnostics, microbatch_load, score_tally


@dataclass(frozen=True)
class Shape:
    """One MoE layer: T tokens, H hidden, I intermediate, E experts, K chosen per token."""

    T: int
    H: int
    I: int  # noqa: E741  # the letter of the papers
    E: int
    K: int


SHAPES = (
    Shape(T=1024, H=512, I=256, E=64, K=8),
    Shape(T=4096, H=1024, I=512, E=64, K=8),
    Shape(T=2048, H=2048, I=768, E=128, K=8),
)


class Layer:
    """A gate with top-k, and one expert's work for each assignment."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.hidden_TH = torch.randn(shape.T, shape.H)
        self.gate_EH = torch.randn(shape.E, shape.H) / shape.H**0.5
        self.up_HI = torch.randn(shape.H, shape.I) / shape.H**0.5
        self.down_IH = torch.randn(shape.I, shape.H) / shape.I**0.5
        self.logits_TE, self.ids_TK = self.route()
        self.probabilities_TE = self.logits_TE.softmax(1)
        self.map_TE = torch.zeros_like(self.logits_TE, dtype=torch.bool).scatter_(1, self.ids_TK, value=True)

    def route(self) -> tuple[Tensor, Tensor]:
        """Gate product, softmax and top-k."""
        logits_TE = self.hidden_TH @ self.gate_EH.t()
        return logits_TE, logits_TE.softmax(1).topk(self.shape.K).indices

    def forward(self) -> None:
        """Route, and gated products of K experts a token, without the cost of moving tokens."""
        self.route()
        for _ in range(self.shape.K):
            gated_TI = torch.nn.functional.silu(self.hidden_TH @ self.up_HI) * (self.hidden_TH @ self.up_HI)
            gated_TI @ self.down_IH

    def naive(self) -> None:
        """Take the same statistics one by one, as they are usually written."""
        probabilities_TE = self.logits_TE.softmax(1)
        self.logits_TE.mean()
        -(probabilities_TE * self.logits_TE.log_softmax(1)).sum(1).mean()
        self.logits_TE.logsumexp(1).square().mean()
        top = probabilities_TE.topk(self.shape.K + 1).values
        ((top[:, -2] - top[:, -1]) / top[:, -2]).mean()
        probabilities_TE.gather(1, self.ids_TK).sum(1).mean()
        probabilities_TE.mean(0)
        self.logits_TE.amax()
        torch.isnan(self.logits_TE).any(1).sum()
        torch.isinf(self.logits_TE).any(1).sum()

    def candidates(self) -> Mapping[str, Callable[[], object]]:
        """Return what is measured, by name."""
        logits, probabilities, ids, chosen = self.logits_TE, self.probabilities_TE, self.ids_TK, self.map_TE
        return {
            "router (gate + softmax + top-k)": self.route,
            "MoE layer forward": self.forward,
            "score statistics, naive": self.naive,
            "score_tally, logits": lambda: score_tally(logits, ids, kind="logits"),
            "score_tally, probabilities": lambda: score_tally(probabilities, ids, kind="probabilities"),
            "score_tally, auto": lambda: score_tally(logits, ids),
            "score_tally, logits with bias": lambda: score_tally(logits, ids, kind="logits", is_biased=True),
            "microbatch_load": lambda: microbatch_load(ids, self.shape.E),
            "build_router_diagnostics": lambda: build_router_diagnostics(
                probabilities, chosen, chosen, None, self.shape.T // 4, 4
            ),
        }


def median_seconds(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each candidate over interleaved rounds, each after a call to warm up."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            run()
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(shape: Shape, rounds: int) -> None:
    """Print one table."""
    seconds = median_seconds(Layer(shape).candidates(), rounds)
    router, forward = list(seconds.values())[:2]
    print(f"\n{shape}\n{'':34}{'ns/token':>10}{'of router':>11}{'of forward':>12}")
    for name, value in seconds.items():
        print(f"{name:34}{value / shape.T * 1e9:10.0f}{value / router:11.2%}{value / forward:12.3%}")


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that the medians are taken of (default: 9)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        for shape in SHAPES:
            report(shape, arguments.rounds)


if __name__ == "__main__":
    main()

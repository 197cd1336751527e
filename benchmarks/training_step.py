"""What telemetry costs in a training step, and in one router call, on the CPU.

python benchmarks/training_step.py

Times are of one thread, medians over rounds that are interleaved, all in one run. `hooks` is the time
spent inside telemetry's own hooks over the time of the whole step: on a machine that other work shares,
it is steadier than the difference of two step times, which is printed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

import moe_telemetry as mt
from moe_telemetry import replaying
from moe_telemetry.demo.training import build_model
from moe_telemetry.taps import Tap
from moe_telemetry.testing import TinyMoe


class Clock:
    """Adds up the time spent in what telemetry does during a router call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the counting and the comparing inside the context."""
        with (
            mock.patch.object(Tap, "add", self._timed(Tap.add, counts=True)),
            mock.patch.object(replaying, "_compare", self._timed(replaying._compare, counts=False)),  # noqa: SLF001
        ):
            yield

    def _timed(self, function: Callable[..., Any], *, counts: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the function's own
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += counts

        return timed


def wide_model() -> nn.Module:
    """Return 4 MoE layers of 64 experts, top-8, hidden size 512, from transformers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415

    return Qwen3MoeForCausalLM(  # type: ignore[no-any-return]
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=512,
            moe_intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            num_experts=64,
            num_experts_per_tok=8,
        )
    )


def step(model: nn.Module, ids: torch.Tensor, context: AbstractContextManager[None]) -> float:
    """Return the seconds of one forward and backward pass."""
    started = time.perf_counter()
    with context:
        loss = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), use_cache=False).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def measure(
    model: nn.Module, ids: torch.Tensor, rounds: int, settings: Mapping[str, Any], use: str
) -> dict[str, float]:
    """Return medians of plain and watched steps, and the share of the hooks, rounds interleaved."""
    clock = Clock()
    plain, watched, shares = [], [], []
    for _ in range(rounds):
        plain.append(step(model, ids, nullcontext()))
        with mt.watch(model, every_n_steps=1, **settings) as monitor:
            context = _routes_in_force(model, monitor, ids, use)
            before = clock.seconds
            with clock.running():
                watched.append(step(model, ids, context))
            shares.append((clock.seconds - before) / watched[-1])
    return {
        "plain": statistics.median(plain),
        "watched": statistics.median(watched),
        "hooks": statistics.median(shares),
        "call": clock.seconds / max(1, clock.calls),
    }


def _routes_in_force(
    model: nn.Module, monitor: mt.Monitor, ids: torch.Tensor, use: str
) -> AbstractContextManager[None]:
    if use == "count":
        return nullcontext()
    with torch.no_grad(), monitor.record() as recording:
        model(input_ids=ids, use_cache=False)
    context: AbstractContextManager[None] = getattr(monitor, use)(recording.routes())
    return context


def host_time_of_a_call(rounds: int) -> tuple[float, float, float]:
    """Return microseconds of a router call on 8 tokens: without a hook, with an empty one, and watched."""
    model = TinyMoe(num_layers=1)
    gate, hidden = model.layers[0].gate, torch.randn(8, 16)

    def call() -> float:
        started = time.perf_counter()
        for _ in range(1000):
            gate(hidden)
        return (time.perf_counter() - started) * 1e3

    bare, empty, watched = [], [], []
    with torch.no_grad():
        for _ in range(rounds):
            bare.append(call())
            handle = gate.register_forward_hook(lambda *_args: None, with_kwargs=True)
            empty.append(call())
            handle.remove()
            with mt.watch(model, routers=model.routers, scores=False):
                watched.append(call())
    return statistics.median(bare), statistics.median(empty), statistics.median(watched)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ids = torch.randint(0, 256, (8, 128))
    print(f"{'model':<30}{'on':<18}{'plain ms':>10}{'watched / plain':>17}{'hooks':>9}{'us a call':>11}")
    for name, model in (("demo, 16 experts top-4", build_model()), ("wide, 64 experts top-8", wide_model())):
        for label, settings, use in (
            ("counts", {"scores": False}, "count"),
            ("counts, scores", {"scores": True}, "count"),
            ("check", {"scores": False}, "check"),
            ("replay", {"scores": False}, "replay"),
        ):
            found = measure(model, ids, rounds, settings, use)
            ratio = found["watched"] / found["plain"]
            print(
                f"{name:<30}{label:<18}{found['plain'] * 1e3:>10.1f}{ratio:>17.3f}"
                f"{found['hooks']:>9.3%}{found['call'] * 1e6:>11.1f}"
            )
    bare, empty, watched = host_time_of_a_call(rounds)
    print(
        f"\na router call on 8 tokens: {bare:.1f} us bare, {empty:.1f} us with an empty hook, {watched:.1f} us watched"
    )


if __name__ == "__main__":
    main()

"""What a route trace takes: bytes on the disk, time in a training step, time to load.

python benchmarks/trace_capture.py

Ids are synthetic, as skewed and as correlated along sequences as those of trained routers; the JSONL form of
the same calls stands beside. Load times, to the counts of every layer, are the shortest of interleaved rounds.
The capture's share of a step is the time spent in it on the training thread over the time of the step, the
median over steps, one thread; the ratio beside it is of the shortest steps. With a GPU, a trace of a small model
is taken under `torch.cuda.set_sync_debug_mode("error")` and compared with what the routers chose.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from training_step import wide_model

import moe_telemetry as mt
from moe_telemetry import taps
from moe_telemetry.testing import TinyMoe
from moe_telemetry.trace.jsonl import write_jsonl
from moe_telemetry.trace.rows import TraceRow
from moe_telemetry.tracing import Trace


def skewed_ids(num_tokens: int, num_experts: int, top_k: int, layer: int) -> torch.Tensor:
    """Return int64 `[T, K]`: experts of unequal popularity, of topics that last for some tokens."""
    chance = torch.Generator().manual_seed(layer)
    popularity_E = torch.randn(num_experts, generator=chance)
    topics_CE = torch.randn(32, num_experts, generator=chance)
    changes_T = torch.rand(num_tokens, generator=chance) < 1 / 24
    topic_T = torch.randint(0, 32, (num_tokens,), generator=chance)[changes_T.cumsum(0)]
    noise_TE = torch.randn(num_tokens, num_experts, generator=chance)
    return (popularity_E + topics_CE[topic_T] + 1.2 * noise_TE).topk(top_k).indices


def capture_ids(folder: Path, calls: dict[int, torch.Tensor], num_experts: int, num_steps: int) -> int:
    """Trace calls that are fed by hand, and return the bytes of the trace."""
    routers = {f"decoder.{layer}": num_experts for layer in calls}
    with mt.watch(torch.nn.Identity(), routers=routers, scores=False) as monitor, monitor.trace(folder):
        for step in range(num_steps):
            for layer, ids_TK in calls.items():
                monitor.observe(layer, ids_TK)
            monitor.step(step)
    return sum(path.stat().st_size for path in folder.iterdir())


def as_jsonl(folder: Path, target: Path) -> int:
    """Write the calls of a trace in the JSONL form, and return its bytes."""
    rows = [
        TraceRow(
            **{name: row[name] for name in ("step", "microbatch", "stage", "rank", "num_tokens", "top_k", "is_sorted")},
            key=mt.RouterKey(row["block"], row["layer"]),
            expert_ids=np.reshape(row["expert_ids"], (-1, row["top_k"])),
            valid=None,
            sequence_starts=np.zeros(1, np.int32),
        )
        for path in sorted(folder.glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    with target.open("w") as stream:
        write_jsonl(rows, stream)
    return target.stat().st_size


def counts_of_trace(folder: Path, num_experts: int) -> dict[int, NDArray[np.int64]]:
    """Return the assignments of every layer, from the Parquet parts."""
    counts: dict[int, NDArray[np.int64]] = {}
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path, columns=["layer", "expert_ids"])
        layers, lists = table["layer"].to_pylist(), table["expert_ids"].combine_chunks()
        flat, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
        for layer, first, last in zip(layers, offsets[:-1], offsets[1:], strict=True):
            found = np.bincount(flat[first:last], minlength=num_experts)
            counts[layer] = counts.get(layer, 0) + found
    return counts


def counts_of_jsonl(path: Path, num_experts: int) -> dict[int, NDArray[np.int64]]:
    """Return the same, as scripts take them from the JSONL form."""
    counts: dict[int, NDArray[np.int64]] = {}
    with path.open() as stream:
        for line in stream:
            values = json.loads(line)
            found = np.bincount(np.asarray(values["top_indices"]).ravel(), minlength=num_experts)
            counts[values["layer"]] = counts.get(values["layer"], 0) + found
    return counts


def best_seconds(functions: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the shortest time of each call, rounds interleaved: other work on the machine only adds to it."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
    return [min(found) for found in times]


def report_files(num_layers: int, num_tokens: int, rounds: int) -> None:
    """Print bytes and load times."""
    print(f"{'experts':>8}{'top-k':>7}{'trace B':>9}{'JSONL B':>9}{'load ns':>9}{'JSONL ns':>10}{'faster':>8}")
    for num_experts, top_k in ((128, 8), (512, 10)):
        calls = {layer: skewed_ids(num_tokens, num_experts, top_k, layer) for layer in range(num_layers)}
        with tempfile.TemporaryDirectory() as name:
            folder, text = Path(name, "trace"), Path(name, "trace.jsonl")
            size = capture_ids(folder, calls, num_experts, num_steps=2)
            text_size = as_jsonl(folder, text)
            a, b = counts_of_trace(folder, num_experts), counts_of_jsonl(text, num_experts)
            if any((a[layer] != b[layer]).any() for layer in calls):
                raise SystemExit("the two forms give different counts")
            loads = partial(counts_of_trace, folder, num_experts), partial(counts_of_jsonl, text, num_experts)
            load, text_load = best_seconds(loads, rounds)
        rows = 2 * num_layers * num_tokens
        print(
            f"{num_experts:>8}{top_k:>7}{size / rows:>9.2f}{text_size / rows:>9.1f}"
            f"{load / rows * 1e9:>9.1f}{text_load / rows * 1e9:>10.0f}{text_load / load:>8.0f}"
        )


class Clock:
    """Adds up the time that a capture spends on the training thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the capture of calls and the end of steps."""
        with (
            mock.patch.object(taps, "capture_call", self._timed(taps.capture_call)),
            mock.patch.object(Trace, "end_step", self._timed(Trace.end_step)),
        ):
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the function's own
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        return timed


def report_steps(num_steps: int) -> None:
    """Print what a capture takes of a training step, alone and with all that it may hold."""
    model = wide_model()
    ids = torch.randint(0, 256, (8, 128))
    every = dict.fromkeys(("scores", "hidden_states", "router_weights", "diagnostics"), True)
    print(f"\n{'captured':<14}{'step ms':>9}{'traced / watched':>18}{'capture':>10}")
    for label, options in (("routes", {}), ("everything", every)):
        plain, traced, shares, clock = [], [], [], Clock()
        with mt.watch(model) as monitor, tempfile.TemporaryDirectory() as name:
            for step in range(num_steps):
                plain.append(_step(model, monitor, ids, 2 * step))
                with monitor.trace(Path(name, str(step)), **options), clock.running():
                    before = clock.seconds
                    traced.append(_step(model, monitor, ids, 2 * step + 1))
                    shares.append((clock.seconds - before) / traced[-1])
        print(f"{label:<14}{min(plain) * 1e3:>9.0f}{min(traced) / min(plain):>18.3f}{statistics.median(shares):>10.3%}")


def _step(model: torch.nn.Module, monitor: mt.Monitor, ids: torch.Tensor, step: int) -> float:
    started = time.perf_counter()
    model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
    monitor.step(step)
    return time.perf_counter() - started


def check_cuda() -> None:
    """Trace on a GPU with waiting for it forbidden, and compare with what the routers chose."""
    model = TinyMoe().cuda()
    hidden = torch.randn(4, 512, 16, device="cuda")
    with mt.watch(model, routers=model.routers) as monitor, tempfile.TemporaryDirectory() as name:
        with monitor.record() as recording:
            model(hidden)
        with monitor.trace(name, scores=True, hidden_states=True, router_weights=True, diagnostics=True):
            torch.cuda.set_sync_debug_mode("error")
            try:
                model(hidden)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        table = pq.read_table(Path(name, "routes-00000-000000.parquet")).to_pylist()
    expected = recording.routes().ids
    found = torch.stack([torch.tensor(row["expert_ids"]).view(-1, 2) for row in table], dim=1)
    print(f"\non {torch.cuda.get_device_name()}: no wait, routes equal: {torch.equal(found.int(), expected)}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"bytes and nanoseconds are of a token and layer; {arguments.layers} layers, {arguments.tokens} tokens")
    report_files(arguments.layers, arguments.tokens, arguments.rounds)
    report_steps(arguments.steps)
    if torch.cuda.is_available():
        check_cuda()


if __name__ == "__main__":
    main()

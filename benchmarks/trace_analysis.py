"""Analyses of a trace against plain pandas scripts over the same routes as JSON lines, and their memory.

python benchmarks/trace_analysis.py

A row is a token in one router call. Rates are medians over rounds, in a process that has imported everything;
the plain scripts do what a reader of the JSON lines would do first. Peak memory is that of a process of its own
that does nothing else, for a tenth of `--ids` expert ids and for ten times as many.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors.numpy import load_file

from moe_telemetry.analysis import concentration, predictability
from moe_telemetry.cli import main as command_line
from moe_telemetry.identity import RouterKey
from moe_telemetry.testing import make_trace

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_TOKENS = 48, 128, 8, 1024


def plain_concentration(path: Path) -> None:
    """Count experts as a script would: one frame of all lines, one row a choice."""
    frame = pd.read_json(path, lines=True)
    choices = frame[["layer", "top_indices"]].explode("top_indices").explode("top_indices")
    counts = pd.crosstab(choices["layer"], choices["top_indices"])
    shares = np.sort(counts.to_numpy(), axis=1)[:, ::-1].cumsum(1)
    _ = shares / shares[:, -1:]


def plain_predictability(path: Path, folder: Path) -> None:
    """Predict as a script would: all tensors in memory, one call at a time, sets of experts for recall."""
    frame = pd.read_json(path, lines=True).set_index(["step", "layer"])["top_indices"]
    tensors = {name: value for file in sorted(folder.glob("tensors-*")) for name, value in load_file(file).items()}
    for (step, layer), lists in frame.items():
        if f"hidden_states/{step}/0/decoder.{layer - 1}" not in tensors:
            continue
        states = tensors[f"hidden_states/{step}/0/decoder.{layer - 1}"]
        weight = tensors[f"router_weights/{step}/0/decoder.{layer}"]
        guesses = np.argsort(-(states @ weight.T), axis=1)[:, :TOP_K]
        hits = sum(len(set(ids) & set(guess)) for ids, guess in zip(lists, guesses.tolist(), strict=True))
        loads = [np.bincount(np.ravel(ids), minlength=NUM_EXPERTS) for ids in (guesses, lists)]
        _ = hits, np.corrcoef(*loads), np.corrcoef(*(pd.Series(load).rank() for load in loads))


def rate(num_rows: int, work: Callable[[], object], rounds: int) -> float:
    """Return rows a second, the median over rounds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return num_rows / statistics.median(times)


def peak_mb(folder: str) -> float:
    """Return the peak memory of a process that counts the trace in `folder`, in megabytes."""
    done = subprocess.run([sys.executable, __file__, "--count", folder], capture_output=True, text=True, check=True)
    return float(done.stdout) / 1024


def own_peak_kib() -> int:
    """Return the peak memory of this process; getrusage would count that of the process which started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0])


def make_large(folder: str, num_ids: int) -> str:
    """Write a trace of about so many expert ids, in parts of about 8 million."""
    num_steps = max(1, num_ids // (NUM_LAYERS * NUM_TOKENS * TOP_K))
    return make_trace(
        folder,
        keys=[RouterKey("decoder", layer) for layer in range(NUM_LAYERS)],
        num_steps=num_steps,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        num_tokens=NUM_TOKENS,
        steps_per_part=20,
        steps_per_row_group=20,
    )


def compare(folder: Path, *, hidden_size: int | None, num_steps: int, rounds: int) -> None:
    """Print the rates of an analysis and of the plain script."""
    name = "predictability" if hidden_size else "concentration"
    num_layers = 8 if hidden_size else NUM_LAYERS
    trace = make_trace(
        folder / "trace",
        num_layers=num_layers,
        num_steps=num_steps,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        num_tokens=NUM_TOKENS,
        hidden_size=hidden_size,
        steps_per_part=4,
    )
    lines = folder / "routes.jsonl"
    command_line(["trace", "export", trace, "--jsonl", str(lines)])
    num_rows = NUM_TOKENS * num_steps * (num_layers - 1 if hidden_size else num_layers)
    analyse = predictability if hidden_size else concentration
    ours = rate(num_rows, lambda: analyse(trace), rounds)
    plain = rate(
        num_rows,
        lambda: plain_predictability(lines, Path(trace)) if hidden_size else plain_concentration(lines),
        rounds,
    )
    size = f"{num_layers} layers, E={NUM_EXPERTS}, K={TOP_K}" + (f", H={hidden_size}" if hidden_size else "")
    print(f"{name} ({size}): {ours:,.0f} rows/s, plain script {plain:,.0f}, ratio {ours / plain:.1f}", flush=True)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ids", type=int, default=2**25, help="expert ids between the two sizes of memory's trace")
    parser.add_argument("--count", metavar="TRACE", help="only count a trace, and print the peak memory in KiB")
    arguments = parser.parse_args()
    if arguments.count:
        concentration(arguments.count)
        print(own_peak_kib())
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder, "c"), hidden_size=None, num_steps=20, rounds=arguments.rounds)
        compare(Path(folder, "p"), hidden_size=1024, num_steps=8, rounds=arguments.rounds)
        few, many = arguments.ids // 10, arguments.ids * 10
        small, large = (peak_mb(make_large(f"{folder}/{count}", count)) for count in (few, many))
        print(f"peak memory: {small:.0f} MB for {few:,} expert ids, {large:.0f} MB for {many:,}")


if __name__ == "__main__":
    main()

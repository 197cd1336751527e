"""What an export costs the thread of an exporter: TensorBoard, W&B (offline) and JSONL, at 64 layers.

python benchmarks/export_sinks.py

CPU time of the whole process and bytes on the disk an export, over all rounds; with W&B, without its own process,
whose CPU time is given beside it. The training thread pays none of it: see `export.py`.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from moe_telemetry.plugins import Exporter, resolve_exporter
from moe_telemetry.snapshot import Snapshot
from moe_telemetry.testing import make_snapshot

__all__ = ["main"]

SINKS: dict[str, dict[str, str]] = {
    "jsonl": {"JSONL_PATH": "{folder}/log.jsonl"},
    "tensorboard": {"TENSORBOARD_LOGDIR": "{folder}/runs", "TENSORBOARD_HEATMAP_EVERY": "{every}"},
    "wandb": {"WANDB_DIR": "{folder}", "WANDB_HEATMAP_EVERY": "{every}"},
}


class Cost(NamedTuple):
    """Of one export, on average."""

    cpu_ms: float
    children_ms: float
    num_bytes: float


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--experts", type=int, default=256)
    options = parser.parse_args()
    os.environ.update({"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    # each round a snapshot of its own: load statistics of one that was seen are remembered
    snapshots = [
        make_snapshot(step=step, num_layers=options.layers, num_experts=options.experts, replayed=True, seed=step)
        for step in range(1, options.rounds + 1)
    ]
    print(f"{options.layers} layers of {options.experts} experts, replayed, an export:")
    for name in SINKS:
        for every, words in (("0", ""), ("1", ", a picture each")) if name != "jsonl" else (("0", ""),):
            cost = _cost(name, every, snapshots)
            print(
                f"{name}{words}: {cost.cpu_ms:.1f} ms of CPU"
                + (f" and {cost.children_ms:.1f} ms in W&B's own process" if name == "wandb" else "")
                + f", {cost.num_bytes:,.0f} bytes"
            )


def _cost(name: str, every: str, snapshots: list[Snapshot]) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        for variable, value in SINKS[name].items():
            os.environ[f"MOE_TELEMETRY_{variable}"] = value.format(folder=folder, every=every)
        _, exporter = resolve_exporter(name)
        exporter.export(snapshots[0])  # opens files and starts runs
        cpu_ms = _timed(time.process_time, exporter, snapshots[1:])
        before = _children_seconds()
        exporter.close()
        if name == "wandb":
            _stop_wandb()
        children_ms = 1e3 * (_children_seconds() - before) / len(snapshots)
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return Cost(cpu_ms, children_ms, num_bytes / len(snapshots))


def _timed(clock: Callable[[], float], exporter: Exporter, snapshots: list[Snapshot]) -> float:
    started = clock()
    for snapshot in snapshots:
        exporter.export(snapshot)
    return 1e3 * (clock() - started) / len(snapshots)


def _children_seconds() -> float:
    """Return the CPU time of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _stop_wandb() -> None:
    import wandb  # noqa: PLC0415  # its settings are read when it is first used

    wandb.teardown()


if __name__ == "__main__":
    main()

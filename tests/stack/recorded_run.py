"""Half an hour of a job, as Prometheus would have scraped it from two endpoints, in a database of its own.

The job trains and evaluates, replays routes, is spread over expert-parallel ranks and exports single experts; its
routers are layers 8 to 11, whose order as text is another one. An earlier run of the same job is finished.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moe_telemetry import Snapshot
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus.text import TextRenderer

INTERVAL_SECONDS = 15
NUM_SCRAPES = 120
JOB, RUN, FINISHED_RUN = "moe", "run-2", "run-1"
INSTANCES = ("node0:9464", "node1:9464")
LAYERS = ("8", "9", "10", "11")
STAGES = ("train", "eval")
TOKENS_PER_STEP = 256


def write_history(end: float, folder: Path) -> None:
    """Write the blocks of a database that ends at a Unix time."""
    text = folder / "history.txt"
    with text.open("wb") as file:
        for scrape in range(NUM_SCRAPES):
            seconds = end - INTERVAL_SECONDS * (NUM_SCRAPES - 1 - scrape)
            for snapshot in _snapshots(scrape + 1, seconds):
                file.write(_exposition(snapshot, seconds))
        file.write(b"# EOF\n")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(text), str(folder / "tsdb")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def _snapshots(step: int, seconds: float) -> Iterator[Snapshot]:
    for node, instance in enumerate(INSTANCES):
        snapshot, window = _running(step, node, seed=0), _running(step, node, seed=step % 7)
        # counters grow evenly, windows differ
        layers = {key: replace(layer, window=window.layers[key].window) for key, layer in snapshot.layers.items()}
        health = replace(
            snapshot.health,
            misalignment="token_shift",
            misalignment_offset=1,
            export_errors={"wandb": step // 10},
            skipped_reductions=step // 40,
        )
        labels = {"job": JOB, "instance": instance}
        yield replace(snapshot, time=seconds, layers=layers, health=health, labels=labels)
    finished = make_snapshot(step=100, run=FINISHED_RUN, labels={"job": JOB, "instance": INSTANCES[0]})
    yield replace(finished, time=seconds, health=replace(finished.health, run_finished=True))


def _running(step: int, node: int, *, seed: int) -> Snapshot:
    return make_snapshot(
        step=step,
        window_steps=1,
        run=RUN,
        node=node,
        num_nodes=len(INSTANCES),
        num_layers=len(LAYERS),
        first_layer=int(LAYERS[0]),
        num_experts=20,
        stages=STAGES,
        replayed=True,
        per_expert=True,
        expert_parallel_ranks=4,
        tokens_per_step=TOKENS_PER_STEP,
        seed=seed,
    )


def _exposition(snapshot: Snapshot, seconds: float) -> bytes:
    """Return what the endpoint shows, every sample with its time."""
    lines = TextRenderer().render(snapshot, openmetrics=True).decode().splitlines()
    kept = [line if line.startswith("#") else f"{line} {seconds:.3f}" for line in lines if line != "# EOF"]
    return "".join(f"{line}\n" for line in kept).encode()

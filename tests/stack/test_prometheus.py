"""A real Prometheus and TensorBoard's own reader tell what the model's own routers did, to the integer."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_telemetry.demo.options import DemoOptions
from tests.stack.processes import free_port, kill_processes_with, running, wait_until
from tests.stack.prometheus_server import Prometheus, prometheus_scraping

pytestmark = pytest.mark.stack

NUM_RANKS = 2
STEPS = 6
LAYERS = range(1, 4)
QUERIES = {
    "tokens": "sum by (stage, layer) (moe_router_tokens_total)",
    "padding": "sum by (stage, layer) (moe_router_padding_tokens_total)",
    "router_assignments": "sum by (stage, layer) (moe_router_assignments_total)",
    "expert_assignments": "sum by (stage, layer, expert) (moe_expert_assignments_total)",
    "experts_of_layer": "sum by (stage, layer) (moe_expert_assignments_total)",
    "observed": "moe_telemetry_routers_observed",
    "runs": "count by (run, block) (moe_router_tokens_total)",
}
LABELS = {"expert_assignments": ("stage", "layer", "expert"), "observed": (), "runs": ("run", "block")}


@dataclass(frozen=True)
class ScrapedRun:
    """What every witness of one run of the demo says."""

    recount: dict[str, Counter[tuple[str, ...]]]
    queried: dict[str, dict[tuple[str, ...], float]]
    exposition: bytes
    logdir: Path
    url: str
    exit_code: int
    log: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ScrapedRun:
    folder = tmp_path_factory.mktemp("stack")
    port = free_port()
    options = DemoOptions(
        steps=STEPS,
        every_n_steps=2,
        evaluate_every_n_steps=3,
        port=port,
        logdir=str(folder / "logs"),
        exporters=("prometheus", "tensorboard"),
        serve=True,
        stop_file=str(folder / "stop"),
    )
    url = f"http://127.0.0.1:{port}/metrics"
    with prometheus_scraping(port, folder) as server, _ranks(options, folder) as ranks:
        wait_until(lambda: _last_step(server, ranks) == STEPS, "the last step is scraped")
        queried = {name: server.query(text, *LABELS.get(name, ("stage", "layer"))) for name, text in QUERIES.items()}
        with urllib.request.urlopen(url, timeout=10) as response:
            exposition = response.read()
        (folder / "stop").touch()
        exit_code = ranks.wait(60)
    log = (folder / "ranks.log").read_text()
    return ScrapedRun(_recount(folder), queried, exposition, folder / "logs", url, exit_code, log)


@contextmanager
def _ranks(options: DemoOptions, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={NUM_RANKS}"]
    worker = str(Path(__file__).with_name("recount_worker.py"))
    try:
        with running([*torchrun, worker, options.to_json(), str(folder)], folder / "ranks.log") as ranks:
            yield ranks
    finally:
        kill_processes_with(str(folder))


def _last_step(server: Prometheus, ranks: subprocess.Popen[bytes]) -> float | None:
    assert ranks.poll() is None, "the ranks ended early: see ranks.log"
    return server.query("moe_telemetry_step").get(())


def _recount(folder: Path) -> dict[str, Counter[tuple[str, ...]]]:
    counted: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in ("tokens", "padding", "assignments")}
    for rank in range(NUM_RANKS):
        for row in json.loads((folder / f"recount{rank}.json").read_text()):
            layer = (row["stage"], str(row["layer"]))
            counted["tokens"][layer] += row["tokens"]
            counted["padding"][layer] += row["padding"]
            for expert, assignments in enumerate(row["assignments"]):
                counted["assignments"][(*layer, str(expert))] += assignments
    return counted


def test_the_recount_saw_every_layer_in_training_and_evaluation_with_padding(run: ScrapedRun) -> None:
    assert set(run.recount["tokens"]) == {(stage, str(layer)) for stage in ("train", "eval") for layer in LAYERS}
    assert all(run.recount["tokens"].values())
    assert run.recount["padding"]["train", "1"] > 0
    assert len(run.recount["assignments"]) == 2 * len(LAYERS) * 16


@pytest.mark.parametrize("name", ["tokens", "padding"])
def test_prometheus_has_the_tokens_of_every_layer(run: ScrapedRun, name: str) -> None:
    assert run.queried[name] == run.recount[name]


def test_prometheus_has_the_assignments_of_every_expert(run: ScrapedRun) -> None:
    assert run.queried["expert_assignments"] == run.recount["assignments"]


def test_assignments_of_a_layer_are_those_of_its_experts(run: ScrapedRun) -> None:
    assert run.queried["router_assignments"] == run.queried["experts_of_layer"]
    assert run.queried["router_assignments"] == {layer: 4 * n for layer, n in run.recount["tokens"].items()}


def test_one_run_has_been_scraped_with_all_its_routers(run: ScrapedRun) -> None:
    assert run.queried["observed"] == {(): len(LAYERS)}
    ((_, block),) = run.queried["runs"]
    assert block == "decoder"


def test_promtool_finds_nothing_wrong_with_the_exposition(run: ScrapedRun) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=run.exposition, capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_tensorboard_reads_the_same_tokens(run: ScrapedRun) -> None:
    events: Any = EventAccumulator(str(run.logdir), size_guidance={"scalars": 0})
    events.Reload()
    last = {
        (stage, str(layer)): events.Scalars(f"moe/router_tokens/{folder}decoder.{layer}")[-1].value
        for stage, folder in {"train": "", "eval": "eval/"}.items()
        for layer in LAYERS
    }
    assert last == run.recount["tokens"]


def test_when_the_run_ends_its_endpoint_is_gone(run: ScrapedRun) -> None:
    assert run.exit_code == 0
    assert "Traceback" not in run.log
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(run.url, timeout=5)

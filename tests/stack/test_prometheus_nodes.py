"""Two nodes, three ways out: a real Prometheus adds up each to what the routers did, and sees the end of the run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_telemetry.catalog import METRICS
from tests.stack.processes import free_port, running, wait_until
from tests.stack.prometheus_server import (
    Prometheus,
    node_exporter_running,
    prometheus_running,
    pushgateway_running,
    scraping,
)

pytestmark = pytest.mark.stack

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("endpoint", "textfile", "pushgateway")
NUM_RANKS = 4
LAYERS = ("0", "1")
OF_THE_JOB = "|".join(
    name + "_(bucket|sum|count)" * (metric.kind == "histogram")
    for name, metric in METRICS.items()
    if metric.source == "job"
)
LABELS = ", ".join({label for metric in METRICS.values() for label in metric.labels})
QUERIES = {
    "tokens": ("sum by (job, layer) (moe_router_tokens_total)", "job", "layer"),
    "padding": ("sum by (job, layer) (moe_router_padding_tokens_total)", "job", "layer"),
    "assignments": ("sum by (job, layer) (moe_router_assignments_total)", "job", "layer"),
    "experts": ("sum by (job, layer, expert) (moe_expert_assignments_total)", "job", "layer", "expert"),
    "shares": ("moe_router_tokens_total", "job", "instance", "layer"),
    "twice": (f'count by (job, __name__, le, {LABELS}) ({{__name__=~"{OF_THE_JOB}"}}) > 1', "job"),
    "gauges": ("count by (job, layer) (moe_load_cv_ratio)", "job", "layer"),
    "samples": ("count by (job) ({run='nodes'})", "job"),
    "finished": ("moe_telemetry_run_finished", "job", "instance"),
}


@dataclass(frozen=True)
class Job:
    """What the ranks counted by themselves, what Prometheus said while they ran and after, and all the logs."""

    counted: Counter[str]
    queried: dict[str, dict[tuple[str, ...], float]]
    finished: dict[tuple[str, ...], float]
    left: dict[tuple[str, ...], float]
    expositions: dict[str, bytes]
    logs: str
    exit_code: int


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("nodes")
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        for node in (0, 1):
            (folder / f"node{node}").mkdir()
        pushgateway = stack.enter_context(pushgateway_running(folder))
        files = [stack.enter_context(node_exporter_running(folder / f"node{node}", folder)) for node in (0, 1)]
        jobs = {
            "endpoint": {"ports": ports},
            "textfile": {"ports": files},
            "pushgateway": {"ports": [pushgateway], "honor_labels": True},
        }
        jobs["pushgateway"]["metric_relabel_configs"] = [{"target_label": "job", "replacement": "pushgateway"}]
        server = stack.enter_context(prometheus_running(scraping(jobs), folder))
        worker = [sys.executable, "-m", "tests.stack.prometheus_node_worker", str(folder)]
        ranks = stack.enter_context(running([*worker, *map(str, [*ports, pushgateway])], folder / "ranks.log"))
        for way in WAYS:
            wait_until(lambda way=way: _nodes_at_end(server, ranks, way) == 2, f"{way}: the last step is scraped")
        queried = {name: server.query(text, *labels) for name, (text, *labels) in QUERIES.items()}
        expositions = {f"endpoint{node}": _read(port) for node, port in enumerate(ports)}
        expositions |= {f"textfile{node}": _file(folder, node) for node in (0, 1)}
        (folder / "stop").touch()
        exit_code = ranks.wait(90)
        server.wait_for('sum(moe_telemetry_run_finished{job!="endpoint"})', 4)
        # an endpoint that is gone is forgotten at the next scrape
        server.wait_for('count(absent(moe_telemetry_run_finished{job="endpoint"}))', 1)
        finished = server.query("max_over_time(moe_telemetry_run_finished[5m])", "job", "instance")
        left = server.query("moe_telemetry_run_finished", "job", "instance")
    counts = sum(
        (Counter(json.loads((folder / f"counts{rank}.json").read_text())) for rank in range(NUM_RANKS)), Counter()
    )
    logs = (folder / "prometheus.log").read_text() + (folder / "pushgateway.log").read_text()
    return Job(counts, queried, finished, left, expositions, logs + (folder / "ranks.log").read_text(), exit_code)


def _nodes_at_end(server: Prometheus, ranks: subprocess.Popen[bytes], way: str) -> float | None:
    assert ranks.poll() is None, "the ranks ended early: see ranks.log"
    return server.query(f'count(moe_telemetry_step{{job="{way}"}} == 6)').get(())


def _read(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        body: bytes = response.read()
    return body


def _file(folder: Path, node: int) -> bytes:
    (file,) = (folder / f"node{node}").iterdir()
    assert file.name == "moe-telemetry.prom"
    return file.read_bytes()


def _layers(job: Job, kind: str) -> dict[tuple[str, ...], int]:
    return {(way, layer): job.counted[f"{kind} {layer}"] for way in WAYS for layer in LAYERS}


def test_the_ranks_counted_different_numbers_of_tokens_and_padding(job: Job) -> None:
    assert job.exit_code == 0
    assert job.counted["tokens 0"] + job.counted["padding 0"] == 8 * 5 * (1 + 2 + 3 + 4)
    assert 0 < job.counted["padding 0"] < job.counted["tokens 0"]


@pytest.mark.parametrize("kind", ["tokens", "padding"])
def test_the_sum_over_both_nodes_is_what_the_routers_saw_whichever_way_it_came(job: Job, kind: str) -> None:
    assert job.queried[kind] == _layers(job, kind)


def test_the_sum_of_the_assignments_is_right_by_layer_and_by_expert(job: Job) -> None:
    assert job.queried["assignments"] == {key: 2 * tokens for key, tokens in _layers(job, "tokens").items()}
    experts = {tuple(key.split()[1:]): count for key, count in job.counted.items() if key.startswith("expert")}
    assert {key: value for key, value in job.queried["experts"].items() if value} == {
        (way, *key): count for way in WAYS for key, count in experts.items()
    }


def test_each_node_shows_its_own_share(job: Job) -> None:
    for way in WAYS:
        shares = sorted(value for key, value in job.queried["shares"].items() if key[0] == way and key[2] == "0")
        assert len(shares) == 2
        assert 0 < shares[0] < shares[1]  # the second node's ranks have more sequences


def test_what_is_about_the_job_as_a_whole_comes_from_one_node(job: Job) -> None:
    assert job.queried["twice"] == {}
    assert job.queried["gauges"] == {(way, layer): 1 for way in WAYS for layer in LAYERS}


def test_every_way_shows_the_same_series(job: Job) -> None:
    assert job.queried["samples"]["endpoint",] > 100
    assert len(set(job.queried["samples"].values())) == 1


def test_the_nodes_have_groups_of_their_own_at_the_pushgateway(job: Job) -> None:
    host = socket.gethostname()
    instances = {instance for way, instance in job.queried["finished"] if way == "pushgateway"}
    assert instances == {f"{host}/0", f"{host}/1"}


def test_prometheus_takes_every_sample_and_no_rank_complains(job: Job) -> None:
    assert "Error on ingesting" not in job.logs
    assert "rror" not in job.logs.replace("Error scraping", "")
    assert "moe_telemetry: exporter" not in job.logs


@pytest.mark.parametrize("name", ["endpoint0", "endpoint1", "textfile0", "textfile1"])
def test_promtool_finds_nothing_wrong(job: Job, name: str) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=job.expositions[name], capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_the_end_of_the_run_is_seen_on_both_nodes_whichever_way_it_came(job: Job) -> None:
    assert set(job.queried["finished"].values()) == {0}
    assert len(job.finished) == 6
    assert set(job.finished.values()) == {1}


def test_files_and_groups_stay_after_the_run_and_endpoints_do_not(job: Job) -> None:
    assert Counter(way for way, _ in job.left) == {"textfile": 2, "pushgateway": 2}

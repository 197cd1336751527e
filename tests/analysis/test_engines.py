"""Engines: processes and a Ray cluster give the numbers of one process, bit by bit; memory does not grow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from moe_telemetry import ConfigError, RouterKey, TraceError
from moe_telemetry.analysis import concentration, predictability
from moe_telemetry.analysis.concentration import ConcentrationCount
from moe_telemetry.analysis.engines import analyse, in_order
from moe_telemetry.analysis.selection import Selection
from moe_telemetry.analysis.timeline import Group, Timeline, Vector
from moe_telemetry.testing import make_trace
from moe_telemetry.trace.reader import Chunk, Part, Trace, open_trace

SHAPE: dict[str, Any] = {
    "num_steps": 7,
    "num_layers": 4,
    "num_experts": 24,
    "top_k": 3,
    "num_microbatches": 2,
    "token_groups": (0, 0, 2),
    "num_padding": 5,
    "hidden_size": 8,
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_trace(tmp_path_factory.mktemp("engines") / "trace", **SHAPE)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Two workers on this machine, for all tests of the module; starting them takes seconds."""
    ray = pytest.importorskip("ray") if "CI" not in os.environ else __import__("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore::FutureWarning:ray", "ignore::ResourceWarning", "ignore::DeprecationWarning:ray")
def test_ray_gives_the_numbers_of_one_process(trace: str, ray_cluster: None) -> None:
    assert concentration(trace, engine="ray") == concentration(trace)
    assert predictability(trace, engine="ray") == predictability(trace)


@pytest.mark.filterwarnings("ignore::FutureWarning:ray", "ignore::ResourceWarning", "ignore::DeprecationWarning:ray")
def test_an_error_in_a_ray_task_is_the_error_of_the_reader(tmp_path: Path, ray_cluster: None) -> None:
    make_trace(tmp_path, keys=[RouterKey("decoder", 0)])
    manifest = tmp_path / "manifest-00000.json"
    manifest.write_text(manifest.read_text().replace("decoder.0", "decoder.5"))
    with pytest.raises(TraceError, match=r"^\S+ has routes of decoder\.0, which its manifests do not name$"):
        concentration(tmp_path, engine="ray")


def test_several_processes_give_the_numbers_of_one(trace: str) -> None:
    assert predictability(trace, workers=2) == predictability(trace)


def _kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class _Killed:
    """An analysis whose process is killed, as by a system that is short of memory."""

    selection: Selection

    def count(self, _trace: Trace, _chunk: Chunk) -> Iterator[Timeline]:
        _kill_process()
        yield Timeline()

    def measure(self, _group: Group, _previous: Vector | None, _current: Vector, /) -> tuple[int, ...]:
        return ()


def test_a_process_that_is_killed_is_said(trace: str) -> None:
    with pytest.raises(TraceError, match=f"a process that counted {trace} was killed, .*: take fewer workers"):
        analyse(open_trace(trace), _Killed(Selection()), workers=2)


@pytest.mark.filterwarnings("ignore::FutureWarning:ray", "ignore::ResourceWarning", "ignore::DeprecationWarning:ray")
def test_a_ray_worker_that_is_killed_is_said(ray_cluster: None) -> None:
    import ray

    from moe_telemetry.analysis import ray_engine

    # at once: by default Ray tries a task again, three times
    task = ray.remote(max_retries=0)(_kill_process)
    with pytest.raises(TraceError, match="Ray could not count a part of the trace: .* died"):
        ray_engine._result(task.remote())


@pytest.mark.parametrize("settings", [{"engine": "ray"}, {"workers": 2}])
def test_memory_of_this_process_is_not_shared_with_others(settings: dict[str, Any]) -> None:
    make_trace("memory://engines")
    try:
        assert concentration("memory://engines").layers
        with pytest.raises(ConfigError, match="memory://engines: other processes do not see this one's memory"):
            concentration("memory://engines", **settings)
    finally:
        fsspec.filesystem("memory").store.clear()


def test_without_ray_the_extra_is_named(trace: str) -> None:
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from moe_telemetry.cli import main\n"
        f"sys.exit(main(['trace', 'concentration', {trace!r}, '--engine', 'ray']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "moe-telemetry: engine 'ray' needs ray: pip install 'moe-telemetry[ray]'\n"


@pytest.mark.parametrize("changes", [{"steps_per_part": 1}, {"steps_per_part": 7, "steps_per_row_group": 7}])
def test_files_cut_otherwise_give_the_same_numbers(trace: str, changes: dict[str, int], tmp_path: Path) -> None:
    other = make_trace(tmp_path, **SHAPE, **changes)
    assert concentration(other).layers == concentration(trace).layers
    assert predictability(other).pairs == predictability(trace).pairs


def test_batches_cut_otherwise_give_the_same_numbers(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = concentration(trace), predictability(trace)
    monkeypatch.setattr("moe_telemetry.trace.reader.IDS_PER_BATCH", 1)
    assert (concentration(trace), predictability(trace)) == before


def test_steps_that_are_complete_are_forgotten_as_reading_goes_on(trace: str) -> None:
    timeline = analyse(open_trace(trace), ConcentrationCount(Selection(), None))
    assert {step for steps in timeline.steps.values() for step in steps} == {6}
    assert {folded.num_steps for folded in timeline.folded.values()} == {6}


def test_tasks_come_back_in_order_and_few_are_under_way() -> None:
    under_way, most = 0, 0

    def submit(task: tuple[Chunk, ...]) -> Timeline:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        return Timeline({}, {}, task[0].first_step)

    def result(handle: Timeline) -> Timeline:
        nonlocal under_way
        under_way -= 1
        return handle

    tasks = [(Chunk(Part(0, number), 0, 1, number, number, 1),) for number in range(20)]
    done = list(in_order(tasks, submit, result, 3))
    assert [(timeline.folded_before, step) for timeline, step in done] == [(number, number) for number in range(20)]
    assert most == 3

"""TensorBoardExporter, read back with TensorBoard's own reader."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_telemetry import ConfigError, Snapshot
from moe_telemetry.load import LoadStats
from moe_telemetry.summary import Spread
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.tensorboard import TensorBoardExporter, scalars

MAX_VIOLATION = "moe/load_max_violation_ratio"


def _write(logdir: Path, *snapshots: Snapshot, resume_step: int | None = None) -> None:
    exporter = TensorBoardExporter(logdir, resume_step=resume_step)
    exporter.start()
    for snapshot in snapshots:
        exporter.export(snapshot)
    exporter.close()


def _read(logdir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(logdir), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def _steps(logdir: Path, tag: str = f"{MAX_VIOLATION}/decoder.0") -> list[int]:
    return [event.step for event in _read(logdir).Scalars(tag)]


def test_a_layer_has_its_statistics_at_their_step_and_time(tmp_path: Path) -> None:
    snapshot = make_snapshot(step=30)
    _write(tmp_path, snapshot)
    for key, layer in snapshot.layers.items():
        stats = LoadStats.of(layer.window["train"].assignments)
        assert stats is not None
        (event,) = _read(tmp_path).Scalars(f"{MAX_VIOLATION}/{key}")
        assert event.value == pytest.approx(stats.max_violation)
        assert (event.step, event.wall_time) == (30, snapshot.time)


def test_the_job_has_mean_max_min_and_p90_over_layers(tmp_path: Path) -> None:
    _write(tmp_path, make_snapshot(num_layers=20))
    accumulator = _read(tmp_path)
    layers = sorted(accumulator.Scalars(f"{MAX_VIOLATION}/decoder.{layer}")[0].value for layer in range(20))
    found = [accumulator.Scalars(f"{MAX_VIOLATION}/{what}")[0].value for what in Spread._fields]
    assert found == pytest.approx([sum(layers) / 20, layers[-1], layers[0], layers[17]])


def test_tokens_are_shown_by_layer_and_other_counters_over_layers() -> None:
    tags = dict(scalars(make_snapshot(step=30)))
    assert tags["moe/router_tokens/decoder.2"] == 30 * 256
    assert tags["moe/router_dropped_assignments/mean"] == 30 * 4
    assert "moe/router_dropped_assignments/decoder.2" not in tags


def test_other_stages_than_train_are_named_in_the_tag() -> None:
    tags = dict(scalars(make_snapshot(stages=("train", "eval"))))
    assert f"{MAX_VIOLATION}/eval/decoder.0" in tags
    assert f"{MAX_VIOLATION}/eval/p90" in tags
    assert f"{MAX_VIOLATION}/decoder.0" in tags


def test_a_stage_that_saw_nothing_in_the_window_is_left_out() -> None:
    assert dict(scalars(make_snapshot(window_steps=0))) == {}


@pytest.mark.parametrize("num_layers", [16, 61])
@pytest.mark.parametrize("per_expert", [False, True])
def test_a_snapshot_has_at_most_ten_tags_a_layer_even_with_per_expert_series(
    num_layers: int, *, per_expert: bool
) -> None:
    tags = [tag for tag, _ in scalars(make_snapshot(num_layers=num_layers, num_experts=64, per_expert=per_expert))]
    assert len(tags) == len(set(tags))
    assert len(tags) <= 10 * num_layers


def test_a_resumed_run_has_no_point_twice(tmp_path: Path) -> None:
    _write(tmp_path, *(make_snapshot(step=step) for step in range(0, 141, 10)))
    _write(tmp_path, *(make_snapshot(step=step) for step in range(100, 151, 10)))
    assert _steps(tmp_path) == list(range(10, 151, 10))  # in step 0 nothing was counted


def test_resuming_at_a_given_step_drops_what_came_after_it(tmp_path: Path) -> None:
    _write(tmp_path, *(make_snapshot(step=step) for step in (10, 20, 30, 40)))
    _write(tmp_path, make_snapshot(step=45), resume_step=21)
    assert _steps(tmp_path) == [10, 20, 45]


def test_a_run_anew_in_the_same_folder_and_process_replaces_the_old_one(tmp_path: Path) -> None:
    for num_snapshots in (5, 2):
        _write(tmp_path, *(make_snapshot(step=10 * turn) for turn in range(1, num_snapshots + 1)))
    assert _steps(tmp_path) == [10, 20]


def test_the_folder_holds_one_run(tmp_path: Path) -> None:
    _write(tmp_path / "runs", make_snapshot(stages=("train", "eval")))
    assert [path.is_file() for path in (tmp_path / "runs").rglob("*")] == [True]


def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        "from moe_telemetry.testing import make_snapshot\n"
        "from moe_telemetry_exporters.tensorboard import TensorBoardExporter\n"
        f"exporter = TensorBoardExporter({str(tmp_path)!r}, flush_seconds=0.1)\n"
        "exporter.export(make_snapshot(step=10))\n"
        "time.sleep(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert _steps(tmp_path) == [10]


def test_a_wrong_flush_interval_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="flush_seconds=0"):
        TensorBoardExporter(flush_seconds=0)

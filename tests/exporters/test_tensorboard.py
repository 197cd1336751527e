"""TensorBoardExporter, read back with TensorBoard's own reader."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from moe_telemetry import ConfigError, Snapshot
from moe_telemetry.charts import FIRST_LOOK
from moe_telemetry.delivery import Delivery
from moe_telemetry.load import LoadStats
from moe_telemetry.summary import Spread
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.heatmap import heatmaps
from moe_telemetry_exporters.tensorboard import TensorBoardExporter
from tests.disks import files_limited_to, wait_for

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


def test_beside_another_writer_telemetry_has_a_folder_of_its_own_and_hides_no_point(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = EventFileWriter(str(tmp_path))
    for step in range(100):
        loop.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag="loss", simple_value=step)])))
    loop.flush()
    _write(tmp_path, make_snapshot(step=10), make_snapshot(step=20))
    _write(tmp_path, make_snapshot(step=20), make_snapshot(step=30))
    loop.close()
    assert _steps(tmp_path, "loss") == [*range(100)]
    assert _steps(tmp_path / "moe") == [10, 20, 30]
    assert f"those of telemetry go to {tmp_path / 'moe'}" in caplog.text


def test_the_job_has_mean_max_min_and_p90_over_layers(tmp_path: Path) -> None:
    _write(tmp_path, make_snapshot(num_layers=20))
    accumulator = _read(tmp_path)
    layers = sorted(accumulator.Scalars(f"{MAX_VIOLATION}/decoder.{layer}")[0].value for layer in range(20))
    found = [accumulator.Scalars(f"{MAX_VIOLATION}/{what}")[0].value for what in Spread._fields]
    assert found == pytest.approx([sum(layers) / 20, layers[-1], layers[0], layers[17]])


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


def test_the_layout_is_the_first_look_once_a_run(tmp_path: Path) -> None:
    _write(tmp_path, make_snapshot(step=10), make_snapshot(step=20))
    (event,) = _read(tmp_path).Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["Load", "Scores", "Replay", "Telemetry"]
    patterns = [pattern for category in layout.category for chart in category.chart for pattern in chart.multiline.tag]
    assert patterns == [chart.pattern for section in FIRST_LOOK for chart in section.charts]


def test_all_experts_are_one_picture_every_so_many_exports(tmp_path: Path) -> None:
    snapshots = [make_snapshot(step=step) for step in (10, 20, 30, 40)]
    exporter = TensorBoardExporter(tmp_path, heatmap_every=3)
    for snapshot in snapshots:
        exporter.export(snapshot)
    exporter.close()
    images = _read(tmp_path).Images("moe/expert_relative_load")
    assert [image.step for image in images] == [10, 40]
    (drawn,) = heatmaps(snapshots[3])
    assert (images[1].width, images[1].height) == (drawn.width, drawn.height)
    assert images[1].encoded_image_string == drawn.png


def test_no_picture_is_drawn_where_none_is_wanted(tmp_path: Path) -> None:
    exporter = TensorBoardExporter(tmp_path, heatmap_every=0)
    exporter.export(make_snapshot())
    exporter.close()
    assert _read(tmp_path).Tags()["images"] == []


def test_a_point_outlives_the_process_that_exported_it(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from moe_telemetry.testing import make_snapshot\n"
        "from moe_telemetry_exporters.tensorboard import TensorBoardExporter\n"
        f"exporter = TensorBoardExporter({str(tmp_path)!r})\n"
        "exporter.export(make_snapshot(step=10))\n"
        "exporter.export(make_snapshot(step=20, replayed=True))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert _steps(tmp_path) == [10, 20]
    assert _steps(tmp_path, "moe/replay_zero_overlap_ratio/decoder.2") == [20]


def test_a_full_disk_is_an_error_of_that_export_and_the_next_goes_on_where_there_is_room(tmp_path: Path) -> None:
    exporter = TensorBoardExporter(tmp_path / "runs", heatmap_every=0)
    exporter.export(make_snapshot(step=10))
    (file,) = (tmp_path / "runs").iterdir()
    size = file.stat().st_size
    with files_limited_to(size + 300), pytest.raises(OSError, match="File too large"):
        exporter.export(make_snapshot(step=20))
    assert file.stat().st_size == size + 300  # half a record, which must not hide what comes after it
    with files_limited_to(10):
        for step in (30, 40):
            with pytest.raises(OSError, match="File too large"):
                exporter.export(make_snapshot(step=step))
    exporter.export(make_snapshot(step=50))
    exporter.close()
    assert _steps(tmp_path / "runs") == [10, 50]
    assert len(list((tmp_path / "runs").iterdir())) == 2  # a disk that stays full is not filled with empty files


def test_a_disk_that_is_full_from_the_start_is_tried_again(tmp_path: Path) -> None:
    exporter = TensorBoardExporter(tmp_path)
    with files_limited_to(10):
        exporter.start()
        with pytest.raises(OSError, match="File too large"):
            exporter.export(make_snapshot(step=10))
    exporter.export(make_snapshot(step=20))
    exporter.close()
    assert _steps(tmp_path) == [20]
    assert metadata.CONFIG_SUMMARY_TAG in _read(tmp_path).Tags()["tensors"]


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    exporter = TensorBoardExporter(tmp_path / "runs")
    exporter.export(make_snapshot(step=10))
    shutil.rmtree(tmp_path / "runs")
    exporter.export(make_snapshot(step=20))
    exporter.close()
    assert _steps(tmp_path / "runs") == [20]


def test_a_folder_that_cannot_be_made_fails_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        TensorBoardExporter(tmp_path / "file" / "runs").start()


def test_a_monitor_counts_the_exports_that_failed_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    delivery = Delivery([("tensorboard", TensorBoardExporter(tmp_path / "runs"))])
    with files_limited_to(10):
        delivery.put(make_snapshot(step=10))
        wait_for(lambda: delivery.errors == {"tensorboard": 1})
    delivery.put(make_snapshot(step=20))
    delivery.close(30)
    assert delivery.errors == {"tensorboard": 1}
    assert _steps(tmp_path / "runs") == [20]


def test_a_wrong_setting_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="heatmap_every=-1: expected a whole number"):
        TensorBoardExporter(heatmap_every=-1)

"""WandbExporter with the real SDK, offline, read back with W&B's own reader."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wandb
from PIL import Image

from moe_telemetry import ConfigError, ExporterError, Snapshot
from moe_telemetry.environment import fields_from_env
from moe_telemetry.plugins import Exporter, exporter_scope
from moe_telemetry.testing import ExporterContract, make_snapshot
from moe_telemetry_exporters.heatmap import heatmaps
from moe_telemetry_exporters.scalars import scalars
from moe_telemetry_exporters.wandb import WandbExporter
from tests.exporters.snapshots import misaligned
from tests.exporters.wandb_files import read_run, run_folders

STEP = "moe/step"
MAX_VIOLATION = "moe/load_max_violation_ratio/decoder.0"


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep W&B on this machine, and its threads, which stay for ever, out of single tests."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(variable)
        folder = tmp_path_factory.mktemp("wandb")
        for name, value in {"MODE": "offline", "SILENT": "true", "CONFIG_DIR": str(folder)}.items():
            patch.setenv(f"WANDB_{name}", value)
        wandb.teardown()  # W&B reads its variables once a process
        wandb.init(dir=folder, settings=wandb.Settings(console="off")).finish()
        yield
        wandb.teardown()


@pytest.fixture(autouse=True)
def _no_run_stays() -> Iterator[None]:
    yield
    if wandb.run is not None:
        wandb.finish()


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Return a run that the training loop has started."""
    settings = wandb.Settings(console="off", x_disable_stats=True)
    return wandb.init(project="mine", dir=tmp_path, settings=settings)


def _export(exporter: WandbExporter, *snapshots: Snapshot) -> None:
    for snapshot in snapshots:
        exporter.export(snapshot)


class TestContract(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:
        return WandbExporter(dir=tmp_path)

    def test_making_one_only_keeps_settings(self, tmp_path: Path) -> None:
        super().test_making_one_only_keeps_settings(tmp_path / "new")


def test_it_is_used_once_a_job() -> None:
    assert exporter_scope(WandbExporter()) == "job"


def test_every_snapshot_is_one_row_with_its_scalars_over_the_training_step(tmp_path: Path) -> None:
    snapshots = [make_snapshot(step=step, replayed=True, stages=("train", "eval")) for step in (10, 20, 30)]
    exporter = WandbExporter(dir=tmp_path, project="mine", heatmap_every=0)
    _export(exporter, *snapshots)
    exporter.close()
    found = read_run(tmp_path)
    assert found.run["project"] == "mine"
    assert found.run["display_name"] == "run-1"
    assert [row[STEP] for row in found.rows] == [10, 20, 30]
    for row, snapshot in zip(found.rows, snapshots, strict=True):
        expected = dict(scalars(snapshot))
        assert {key for key in row if key.startswith("moe/")} == {STEP, *expected}
        assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert {"name": STEP, "options": {"defined": True, "hidden": True}} in found.metrics
    assert [metric["step_metric"] for metric in found.metrics if metric.get("glob_name") == "moe/*"] == [STEP]
    assert found.config["moe_telemetry"]["world_size"] == 1


def test_a_run_that_was_started_here_is_finished_at_the_end(tmp_path: Path) -> None:
    exporter = WandbExporter(dir=tmp_path)
    exporter.export(make_snapshot())
    assert wandb.run is not None
    exporter.close()
    assert wandb.run is None


def test_the_run_of_the_training_loop_is_used_and_left_open(run: Any, tmp_path: Path) -> None:
    exporter = WandbExporter(dir=tmp_path, project="another")
    exporter.export(make_snapshot())
    exporter.close()
    assert wandb.run is run
    run.log({"loss": 0.5})
    run.finish()
    found = read_run(tmp_path)
    assert found.run["project"] == "mine"
    assert len(found.rows_with("loss")) == len(found.rows_with(MAX_VIOLATION)) == 1


@pytest.mark.parametrize("exports_a_step", [1, 3])
def test_no_row_of_a_loop_with_its_own_steps_is_lost_and_none_of_ours(
    run: Any, tmp_path: Path, exports_a_step: int
) -> None:
    exporter = WandbExporter(heatmap_every=0)
    steps = range(100, 112)
    ours = iter(range(1, 1000))
    for step in steps:
        run.log({"loss": step / 2}, step=step)
        # at first, as a thread does that was held up
        for _ in range(exports_a_step if step < 103 else 0 if step < 110 else 1):
            exporter.export(make_snapshot(step=next(ours)))
        run.log({"lr": step / 4}, step=step)
    exporter.close()
    run.finish()
    found = read_run(tmp_path)
    assert [row["_step"] for row in found.rows_with("loss")] == list(steps)
    assert [row["lr"] for row in found.rows_with("lr")] == [step / 4 for step in steps]
    assert [row[STEP] for row in found.rows_with(MAX_VIOLATION)] == list(range(1, next(ours)))


def test_what_the_loop_logs_after_the_monitor_closed_is_kept(run: Any, tmp_path: Path) -> None:
    exporter = WandbExporter(heatmap_every=0)
    run.log({"loss": 1.0}, step=7)
    exporter.export(make_snapshot(step=7))
    exporter.export(replace(make_snapshot(step=7, window_steps=0), time=1.0))  # the last one, at the same step
    exporter.close()
    run.log({"final": 2.0}, step=7)
    run.finish()
    (row,) = read_run(tmp_path).rows
    assert (row["loss"], row["final"], row[STEP]) == (1.0, 2.0, 7)
    assert row[MAX_VIOLATION] > 0


def test_a_loop_that_logs_seldom_is_not_waited_for(run: Any, tmp_path: Path) -> None:
    exporter = WandbExporter(heatmap_every=0)
    run.log({"loss": 1.0})
    for step in range(1, 101):
        exporter.export(make_snapshot(step=step, num_layers=1))
    assert run.step > 30  # what is more than 64 rows old has been written
    run.log({"loss": 2.0})
    exporter.close()
    run.finish()
    found = read_run(tmp_path)
    assert [row[STEP] for row in found.rows_with(MAX_VIOLATION)] == list(range(1, 101))
    assert len(found.rows_with("loss")) == 2


def test_a_loop_that_joins_a_run_that_was_started_here_keeps_its_rows(tmp_path: Path) -> None:
    exporter = WandbExporter(dir=tmp_path, heatmap_every=0)
    exporter.export(make_snapshot(step=1))
    joined = wandb.init(dir=tmp_path / "unused")  # W&B gives the run that is there
    for step in range(50, 54):
        joined.log({"loss": step}, step=step)
        exporter.export(make_snapshot(step=step))
        exporter.export(make_snapshot(step=step + 100))
        joined.log({"lr": step}, step=step)
    exporter.close()
    found = read_run(tmp_path)
    assert [row["lr"] for row in found.rows_with("lr")] == [50, 51, 52, 53]
    assert len(found.rows_with(MAX_VIOLATION)) == 9


def test_a_snapshot_after_the_run_is_finished_is_an_error_that_says_what_to_do(run: Any) -> None:
    exporter = WandbExporter()
    exporter.export(make_snapshot())
    run.finish()
    with pytest.raises(ExporterError, match=r"is finished.* close the monitor before wandb.finish\(\)"):
        exporter.export(make_snapshot(step=20))
    exporter.close()
    assert wandb.run is None


def test_snapshots_that_waited_for_a_run_that_is_finished_are_told(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = WandbExporter(heatmap_every=0)
    for step in (10, 20, 30):  # the first joins the row of the loop, which is open until it logs again
        exporter.export(make_snapshot(step=step))
    run.finish()
    with pytest.raises(ExporterError, match="lost, 3 in number"):
        exporter.export(make_snapshot(step=40))
    second = wandb.init(dir=tmp_path / "second", settings=wandb.Settings(console="off"))
    for step in (50, 60):
        exporter.export(make_snapshot(step=step))
    second.finish()
    third = wandb.init(dir=tmp_path / "third", settings=wandb.Settings(console="off"))
    exporter.export(make_snapshot(step=70))
    exporter.close()
    third.finish()
    assert [message for message in caplog.messages if "lost, 1 in number" in message and second.id in message]
    assert [row[STEP] for row in read_run(tmp_path / "third").rows] == [70]


def test_a_run_that_stands_beside_others_is_used_and_left_to_the_program(tmp_path: Path) -> None:
    settings = wandb.Settings(console="off", x_disable_stats=True)
    beside = wandb.init(dir=tmp_path, settings=settings, reinit="create_new")
    assert wandb.run is None
    exporter = WandbExporter(dir=tmp_path / "unused", heatmap_every=0)
    for step in range(1, 5):
        beside.log({"loss": step})
        exporter.export(make_snapshot(step=step))
    exporter.close()
    beside.log({"loss": 5})
    exporter.export(make_snapshot(step=5))
    beside.finish()
    with pytest.raises(ExporterError, match="is finished"):
        exporter.export(make_snapshot(step=6))
    found = read_run(tmp_path)
    assert [row["loss"] for row in found.rows_with("loss")] == [1, 2, 3, 4, 5]
    assert [row[STEP] for row in found.rows_with(STEP)] == [1, 2, 3, 4, 5]


def test_the_next_run_of_a_sweep_is_followed(run: Any, tmp_path: Path) -> None:
    exporter = WandbExporter()
    exporter.export(make_snapshot())
    run.finish()
    second = wandb.init(dir=tmp_path / "second", settings=wandb.Settings(console="off"))
    exporter.export(make_snapshot(step=20))
    exporter.close()
    second.finish()
    assert [row[STEP] for row in read_run(tmp_path / "second").rows] == [20]


def test_a_run_that_is_disabled_is_left_alone(tmp_path: Path) -> None:
    with wandb.init(mode="disabled"):
        exporter = WandbExporter(dir=tmp_path)
        exporter.export(misaligned(make_snapshot()))
        exporter.close()
    assert run_folders(tmp_path) == []


def test_a_resumed_run_keeps_its_id_and_goes_on(tmp_path: Path) -> None:
    code = (
        "from moe_telemetry.testing import make_snapshot\n"
        "from moe_telemetry_exporters.wandb import WandbExporter\n"
        "exporter = WandbExporter()\n"
        "exporter.export(make_snapshot())\n"
        "exporter.close()\n"
    )
    (tmp_path / "first").mkdir()
    (tmp_path / "again").mkdir()
    for turn in ("first", "again"):
        variables = {"WANDB_RUN_ID": "abc123", "WANDB_RESUME": "allow", "WANDB_DIR": str(tmp_path / turn)}
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, check=True, timeout=60)
    assert [read_run(tmp_path / turn).run["run_id"] for turn in ("first", "again")] == ["abc123", "abc123"]


def test_all_experts_of_61_layers_are_one_picture_and_no_key(tmp_path: Path) -> None:
    snapshots = [make_snapshot(step=step, num_layers=61, num_experts=256, per_expert=True) for step in (1, 2, 3)]
    exporter = WandbExporter(dir=tmp_path, heatmap_every=2)
    _export(exporter, *snapshots)
    exporter.close()
    found = read_run(tmp_path)
    rows = found.rows_with("moe/expert_relative_load.path")
    assert [row[STEP] for row in rows] == [1, 3]
    assert len({key for row in found.rows for key in row}) < 10 * 61
    file = found.folder / "files" / rows[0]["moe/expert_relative_load.path"]
    assert file.stat().st_size < 64 * 1024
    (drawn,) = heatmaps(snapshots[0])
    with Image.open(file) as written, Image.open(io.BytesIO(drawn.png)) as expected:
        assert written.format == "PNG"
        assert written.convert("RGB").tobytes() == expected.convert("RGB").tobytes()


def test_keys_stay_the_same_when_other_experts_get_hot(tmp_path: Path) -> None:
    exporter = WandbExporter(dir=tmp_path, heatmap_every=0)
    _export(exporter, *(make_snapshot(step=step, num_experts=64, seed=step) for step in range(1, 41)))
    exporter.close()
    found = read_run(tmp_path)
    assert len(found.rows) == 40
    assert {frozenset(row) for row in found.rows} == {frozenset(found.rows[0])}
    assert {key for key in found.summary if not key.startswith(("_", "moe/summary/"))} <= set(found.rows[0])


def test_the_summary_has_how_the_run_ended_and_the_worst_of_it(tmp_path: Path) -> None:
    exporter = WandbExporter(dir=tmp_path, heatmap_every=0)
    _export(exporter, misaligned(make_snapshot(step=10)), make_snapshot(step=20, replayed=True))
    exporter.export(make_snapshot(step=20, window_steps=0))
    exporter.close()
    summary = read_run(tmp_path).summary
    assert summary["moe/summary/highest_replay_zero_overlap"] == 0.5
    assert summary["moe/summary/replay_agreement"] > 0.99
    assert summary["moe/summary/hottest_expert"].startswith("decoder.")
    assert summary["moe/summary/dead_experts"] == 0


def test_a_misaligned_replay_alerts_once_while_it_stands(tmp_path: Path) -> None:
    exporter = WandbExporter(dir=tmp_path, heatmap_every=0)
    _export(exporter, *(misaligned(make_snapshot(step=step)) for step in (10, 20, 30)))
    exporter.close()
    alerts = read_run(tmp_path).alerts
    assert [(alert["title"], alert["level"]) for alert in alerts] == [
        ("MoeReplayAgreementLow", "WARN"),
        ("MoeReplayZeroOverlapHigh", "ERROR"),
    ]
    assert "step 10" in alerts[1]["text"]
    assert "decoder.2" in alerts[1]["text"]


def test_alerts_can_be_turned_off(tmp_path: Path) -> None:
    exporter = WandbExporter(dir=tmp_path, heatmap_every=0, alerts=False)
    exporter.export(misaligned(make_snapshot()))
    exporter.close()
    assert read_run(tmp_path).alerts == []


def test_without_a_login_it_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    exporter = WandbExporter(mode="online", dir=tmp_path)
    with pytest.raises(ExporterError, match="not logged in to W&B: run `wandb login`"):
        exporter.export(make_snapshot())
    with pytest.raises(ExporterError, match="trying again in"):
        exporter.export(make_snapshot(step=20))
    exporter.close()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mode": "dryrun"}, "mode='dryrun': expected one of online, offline, shared, disabled"),
        ({"init_timeout_seconds": 0}, "init_timeout_seconds=0: expected seconds above 0"),
        ({"heatmap_every": -1}, "heatmap_every=-1: expected a whole number"),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_made(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WandbExporter(**setting)


def test_its_settings_come_from_the_environment() -> None:
    environ = {"MOE_TELEMETRY_WANDB_PROJECT": "p", "MOE_TELEMETRY_WANDB_ALERTS": "off", "MOE_TELEMETRY_WANDB_DIR": "d"}
    settings = fields_from_env(WandbExporter, "MOE_TELEMETRY_WANDB_", environ)
    assert settings == {"project": "p", "alerts": False, "dir": "d"}

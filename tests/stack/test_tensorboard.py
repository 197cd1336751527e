"""The real TensorBoard server shows what was exported: scalars, layout, pictures; after a resume and a full disk too.

Both of its readers are asked: the one in its data server, which is the default, and the one in Python.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from moe_telemetry.charts import FIRST_LOOK
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.heatmap import heatmaps
from moe_telemetry_exporters.scalars import scalars
from moe_telemetry_exporters.tensorboard import TensorBoardExporter
from tests.disks import files_limited_to
from tests.stack.processes import wait_until
from tests.stack.tensorboard_server import TensorBoard, tensorboard_running

pytestmark = pytest.mark.stack

PICTURE = "moe/expert_relative_load"
TOKENS = "moe/router_tokens/decoder.0"
LARGE = [make_snapshot(step=step, num_layers=24, num_experts=64, replayed=True) for step in (10, 20, 30)]


@pytest.fixture(scope="module", params=["true", "false"], ids=["data server", "Python"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    folder = tmp_path_factory.mktemp("tensorboard")
    _write_runs(folder / "logs")
    with tensorboard_running(folder / "logs", folder, f"--load_fast={request.param}") as found:
        wait_until(lambda: _last_steps(found) == {"large": 30, "resumed": 150, "full": 50}, "all runs are read")
        yield found


def _write_runs(logdir: Path) -> None:
    exporter = TensorBoardExporter(logdir / "large", heatmap_every=2)
    for snapshot in LARGE:
        exporter.export(snapshot)
    exporter.close()
    for steps in (range(10, 141, 10), range(100, 151, 10)):
        exporter = TensorBoardExporter(logdir / "resumed")
        for step in steps:
            exporter.export(make_snapshot(step=step))
        exporter.close()
    _write_to_a_disk_that_fills_up(logdir / "full")


def _write_to_a_disk_that_fills_up(folder: Path) -> None:
    exporter = TensorBoardExporter(folder)
    exporter.export(make_snapshot(step=10))
    (file,) = folder.iterdir()
    with files_limited_to(file.stat().st_size + 500), pytest.raises(OSError, match="too large"):
        exporter.export(make_snapshot(step=20))
    with files_limited_to(10), pytest.raises(OSError, match="too large"):
        exporter.export(make_snapshot(step=30))
    for step in (40, 50):
        exporter.export(make_snapshot(step=step))
    exporter.close()


def _last_steps(server: TensorBoard) -> dict[str, int]:
    return {run: server.points(run, TOKENS)[-1][0] for run in server.get("scalars/tags")}


def test_every_scalar_has_the_values_of_its_snapshots(server: TensorBoard) -> None:
    expected = [dict(scalars(snapshot)) for snapshot in LARGE]
    assert set(server.get("scalars/tags")["large"]) == set(expected[0])
    for tag in (
        TOKENS,
        "moe/load_max_violation_ratio/decoder.23",
        "moe/replay_agreement_ratio/min",
        "moe/logit_max/p90",
    ):
        points = server.points("large", tag)
        assert [step for step, _ in points] == [10, 20, 30]
        assert [value for _, value in points] == pytest.approx([values[tag] for values in expected])


def test_a_resumed_run_has_every_step_once(server: TensorBoard) -> None:
    assert server.points("resumed", TOKENS) == [(step, step * 256) for step in range(10, 151, 10)]


def test_half_a_record_of_a_full_disk_hides_nothing_that_came_later(server: TensorBoard) -> None:
    assert [step for step, _ in server.points("full", TOKENS)] == [10, 40, 50]


def test_the_layout_is_the_first_look(server: TensorBoard) -> None:
    categories = server.get("custom_scalars/layout")["category"]
    found = {each["title"]: [chart["title"] for chart in each["chart"]] for each in categories}
    assert found == {section.title: [chart.title for chart in section.charts] for section in FIRST_LOOK}


@pytest.mark.parametrize("chart", [chart for section in FIRST_LOOK for chart in section.charts], ids=lambda c: c.title)
def test_every_chart_of_the_layout_has_lines(server: TensorBoard, chart: object) -> None:
    answer = server.get("custom_scalars/scalars", run="large", tag=getattr(chart, "pattern", ""))
    assert answer["regex_valid"]
    lines = answer["tag_to_events"]
    assert lines
    assert all(len(points) == len(LARGE) for points in lines.values())
    if "by layer" in getattr(chart, "title", ""):
        assert len(lines) == 24


def test_pictures_are_the_ones_that_were_drawn(server: TensorBoard) -> None:
    pictures = server.get("images/images", run="large", tag=PICTURE, sample=0)
    assert [picture["step"] for picture in pictures] == [10, 30]
    (drawn,) = heatmaps(LARGE[2])
    query = dict(pair.split("=", 1) for pair in pictures[1]["query"].split("&"))
    served = server.read("images/individualImage", **query)
    with Image.open(io.BytesIO(served)) as image, Image.open(io.BytesIO(drawn.png)) as expected:
        assert image.size == (drawn.width, drawn.height)
        assert image.convert("RGB").tobytes() == expected.convert("RGB").tobytes()

"""The live page in a real browser, at a real endpoint, and at that of the demo."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from moe_telemetry import RouterKey, Snapshot
from moe_telemetry.load import LoadStats
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter
from tests.stack.live_pages import DESK, PHONE, Open
from tests.stack.processes import free_port, kill_processes_with, running, wait_until

pytestmark = pytest.mark.stack

ODD = "\"><script>document.title='broken'</script><img src=x onerror=alert(1)> & 'é漢🙂"


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter(port=0)
    exporter.start()
    yield exporter
    exporter.close()


def _now(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, time=time.time())


def _column(page: Page, title: str) -> list[str]:
    titles = [re.sub(r" [▴▾]$", "", text) for text in page.locator("#columns th").all_inner_texts()]
    return page.locator(f"#rows td:nth-child({titles.index(title) + 1})").all_inner_texts()


def _picture(page: Page, selector: str) -> Image.Image:
    return Image.open(BytesIO(page.locator(selector).screenshot())).convert("RGB")


def _brightness(image: Image.Image) -> float:
    pixels = image.resize((32, 32)).convert("L").tobytes()
    return sum(pixels) / len(pixels)


def _num_colours(image: Image.Image) -> int:
    return len(image.getcolors(maxcolors=image.width * image.height) or ())


def _misaligned(snapshot: Snapshot) -> Snapshot:
    """All replayed rows of the first layer are another token's, and one expert of the second has no token."""
    first, second, *_ = snapshot.layers
    layers = dict(snapshot.layers)
    counts = layers[first].window["train"]
    assert counts.replay is not None
    replay = replace(counts.replay, zero_overlap=counts.replay.checked, shared_experts=0)
    layers[first] = replace(
        layers[first], window={"train": replace(counts, replay=replay)}, worst_rank_zero_overlap=1.0
    )
    counts = layers[second].window["train"]
    dead = replace(counts, assignments=(0, *counts.assignments[1:]))
    layers[second] = replace(layers[second], window={"train": dead})
    health = replace(snapshot.health, misalignment="token_shift", misalignment_offset=1)
    return replace(snapshot, layers=layers, health=health)


def test_the_table_and_the_figures_are_the_snapshots(exporter: PrometheusExporter, visit: Open) -> None:
    snapshot = make_snapshot(num_layers=12, num_experts=16, replayed=True, labels={"team": "a"})
    exporter.export(_now(snapshot))
    seen = visit()
    page = seen.open(exporter)
    expect(page.locator("#rows tr")).to_have_count(12)
    assert _column(page, "layer") == [f"decoder.{layer}" for layer in range(12)]
    loads = [LoadStats.of(layer.window["train"].assignments) for layer in snapshot.layers.values()]
    assert _column(page, "MaxVio") == [f"{load.max_violation:.2f}" for load in loads if load]
    checks = [layer.replay for layer in snapshot.layers.values() if layer.replay is not None]
    assert _column(page, "agreement") == [f"{100 * (check.agreement or 0):.1f} %" for check in checks]
    expect(page.locator("#run")).to_have_text("run-1")
    expect(page.locator("#labels")).to_have_text("team=a")
    expect(page.locator("#state")).to_have_text("live")
    assert (len(seen.hosts), seen.complaints) == (1, [])


def test_a_new_snapshot_is_shown_without_a_reload(exporter: PrometheusExporter, visit: Open) -> None:
    exporter.export(_now(make_snapshot(step=10)))
    page = visit().open(exporter)
    expect(page.locator("#facts")).to_contain_text("10")
    page.evaluate("window.isTheSame = true")
    for step in (20, 30):
        exporter.export(_now(make_snapshot(step=step, seed=step)))
    expect(page.locator("#window")).to_contain_text("step 30")
    load = LoadStats.of(make_snapshot(step=30, seed=30).layers[RouterKey("decoder", 0)].window["train"].assignments)
    assert load is not None
    assert _column(page, "MaxVio")[0] == f"{load.max_violation:.2f}"
    assert page.evaluate("window.isTheSame")
    expect(page.locator(".curve[data-measure=max_violation] path.worst")).to_have_attribute("d", re.compile("^M.*L.*L"))


def test_a_page_opened_before_the_first_snapshot_waits_for_it(exporter: PrometheusExporter, visit: Open) -> None:
    page = visit().open(exporter)
    expect(page.locator("#state")).to_have_text("waiting for the first snapshot")
    expect(page.locator("main")).to_be_hidden()
    exporter.export(_now(make_snapshot()))
    expect(page.locator("main")).to_be_visible()


def test_any_column_sorts_and_the_first_click_shows_the_largest(exporter: PrometheusExporter, visit: Open) -> None:
    exporter.export(_now(make_snapshot(num_layers=12)))
    page = visit().open(exporter)
    expect(page.locator("#rows tr")).to_have_count(12)
    header = page.locator("th[data-name=max_violation]")
    header.locator("button").click()
    falling = [float(text.removeprefix("! ")) for text in _column(page, "MaxVio")]
    assert falling == sorted(falling, reverse=True)
    expect(header).to_have_attribute("aria-sort", "descending")
    header.locator("button").press("Enter")
    assert _column(page, "MaxVio") == [f"{value:.2f}" for value in sorted(falling)]
    page.locator("th[data-name=order] button").click()
    # numbers as numbers: 2 before 10
    assert _column(page, "layer") == [f"decoder.{layer}" for layer in range(12)]


def test_text_of_the_user_is_shown_as_it_is_and_never_run(exporter: PrometheusExporter, visit: Open) -> None:
    exporter.export(_now(make_snapshot(run=ODD, labels={"team": ODD}, stages=("train", ODD))))
    seen = visit()
    page = seen.open(exporter)
    expect(page.locator("#run")).to_have_text(ODD)
    page.get_by_role("button", name=ODD).click()
    expect(page.get_by_role("button", name=ODD)).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#window")).to_contain_text(ODD)
    page.reload()
    expect(page.get_by_role("button", name=ODD)).to_have_attribute("aria-pressed", "true")
    assert page.locator("img").count() == 0
    assert page.title().startswith(ODD) or ODD in page.title()
    assert seen.complaints == []


def test_alerts_name_the_layer_the_time_and_the_runbook(exporter: PrometheusExporter, visit: Open) -> None:
    exporter.export(_now(_misaligned(make_snapshot(replayed=True))))
    page = visit().open(exporter)
    alert = page.locator("details.alert").first
    expect(alert).to_contain_text("MoeReplayZeroOverlapHigh")
    expect(alert).to_contain_text("100.0% of the replayed tokens of decoder.0")
    expect(alert).to_contain_text(re.compile(r"pending, \d+ s of 2 min"))
    expect(page.locator("#alerts")).to_contain_text("token_shift, offset 1")
    alert.locator("summary").press("Enter")
    expect(alert.locator(".more")).to_be_visible()
    expect(alert.locator(".more")).to_contain_text("runbook.md#moereplayzerooverlaphigh")
    marked = page.locator("tr[data-layer='decoder.0'] td.bad").all_inner_texts()
    assert "! 100.0 %" in marked or "100.0 %" in marked
    assert page.title().startswith("(")
    # an open row stays open when the next snapshot comes, and goes when all is well
    exporter.export(_now(_misaligned(make_snapshot(step=20, replayed=True))))
    expect(page.locator("#window")).to_contain_text("step 20")
    expect(alert.locator(".more")).to_be_visible()
    exporter.export(_now(replace(make_snapshot(step=30, replayed=True), health=make_snapshot().health)))
    expect(page.locator("#alerts")).not_to_contain_text("MoeReplayZeroOverlapHigh")


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_colour_scheme_and_nothing_is_wider_than_the_screen(
    exporter: PrometheusExporter, visit: Open, size: tuple[int, int], scheme: str
) -> None:
    for step in (10, 20):
        exporter.export(_now(make_snapshot(step=step, num_layers=6, replayed=True, stages=("train", "eval"))))
    seen = visit(size, scheme)
    page = seen.open(exporter)
    expect(page.locator("#rows tr")).to_have_count(6)
    image = Image.open(BytesIO(page.screenshot())).convert("RGB")
    assert (_brightness(image) > 200) if scheme == "light" else (_brightness(image) < 60)
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    assert seen.complaints == []


def test_the_heatmap_has_a_colour_for_every_load_and_tells_each_expert(
    exporter: PrometheusExporter, visit: Open
) -> None:
    snapshot = make_snapshot(num_layers=2, num_experts=4)
    loads = {RouterKey("decoder", 0): (0, 100, 100, 200), RouterKey("decoder", 1): (50, 50, 50, 50)}
    layers = {
        key: replace(layer, window={"train": replace(layer.window["train"], assignments=loads[key])})
        for key, layer in snapshot.layers.items()
    }
    exporter.export(_now(replace(snapshot, layers=layers)))
    page = visit().open(exporter)
    expect(page.locator("#rows tr")).to_have_count(2)
    image = _picture(page, "#heatmap")
    x = [image.width * (place + 0.5) / 4 for place in range(4)]
    top = [image.getpixel((int(at), 12)) for at in x]
    bottom = {image.getpixel((int(at), 36)) for at in x}
    assert top[0] == (11, 13, 16)
    assert top[1] == top[2] in bottom
    assert len(bottom) == 1
    red, _, blue = top[3]  # type: ignore[misc]
    assert red > blue + 50
    page.locator("#heatmap").hover(position={"x": x[3], "y": 12})
    expect(page.locator("#tip")).to_have_text("decoder.0, expert 3: 2.00 \u00d7 the mean load")
    page.locator("#heatmap").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    expect(page.locator("#heat-cell")).to_have_text("decoder.1, expert 1: 1.00 \u00d7 the mean load")
    page.keyboard.press("Enter")
    expect(page.locator("tr.selected")).to_have_attribute("data-layer", "decoder.1")
    expect(page.locator("#legend-layer")).to_have_text("decoder.1")


def test_a_layer_is_selected_from_the_table_and_kept_in_the_address(exporter: PrometheusExporter, visit: Open) -> None:
    for step in (10, 20):
        exporter.export(_now(make_snapshot(step=step)))
    page = visit().open(exporter)
    page.get_by_role("button", name="decoder.2").click()
    expect(page.locator(".curve path.own").first).to_be_attached()
    assert "layer=decoder.2" in page.url
    page.reload()
    expect(page.locator("tr.selected")).to_have_attribute("data-layer", "decoder.2")
    page.get_by_role("button", name="decoder.2").click()
    expect(page.locator(".curve path.own")).to_have_count(0)


def test_a_large_model_is_usable(exporter: PrometheusExporter, visit: Open) -> None:
    for step in (10, 20):
        exporter.export(_now(make_snapshot(step=step, num_layers=61, num_experts=256, top_k=8, replayed=True)))
    seen = visit()
    page = seen.open(exporter)
    expect(page.locator("#rows tr")).to_have_count(61)
    assert _num_colours(_picture(page, "#heatmap")) > 30
    page.get_by_role("button", name="by load").click()
    image = _picture(page, "#heatmap")
    left, right = image.getpixel((40, 50)), image.getpixel((image.width - 3, 50))
    assert left[0] > left[2]  # type: ignore[index]
    assert right[0] < right[2]  # type: ignore[index]
    page.locator("th[data-name=gini] button").click()
    gini = [float(text) for text in _column(page, "Gini")]
    assert gini == sorted(gini, reverse=True)
    assert seen.complaints == []


def test_an_endpoint_that_goes_away_is_said_and_one_that_comes_back_is_shown(
    exporter: PrometheusExporter, visit: Open
) -> None:
    exporter.export(_now(make_snapshot(step=10)))
    page = visit().open(exporter)
    expect(page.locator("#state")).to_have_text("live")
    port = int(urlsplit(str(exporter.url)).port or 0)
    exporter.close()
    expect(page.locator("#state")).to_have_text("endpoint gone")
    expect(page.locator("#notice")).to_contain_text("What you see is of step 10.")
    expect(page.locator("#rows tr")).to_have_count(3)
    again = PrometheusExporter(port=port)
    again.start()
    again.export(_now(make_snapshot(step=40)))
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#window")).to_contain_text("step 40")
    again.close()


def test_it_works_behind_a_password_in_the_address(visit: Open) -> None:
    exporter = PrometheusExporter(port=0, username="u", password="p")
    exporter.start()
    try:
        exporter.export(_now(make_snapshot()))
        page = visit().page
        page.goto(str(exporter.url).replace("http://", "http://u:p@").replace("/metrics", "/"))
        expect(page.locator("#rows tr")).to_have_count(3)
    finally:
        exporter.close()


def test_a_node_that_does_not_lead_says_so_and_shows_the_job(exporter: PrometheusExporter, visit: Open) -> None:
    exporter.export(_now(make_snapshot(node=1, num_nodes=2)))
    page = visit().open(exporter)
    expect(page.locator("#notice")).to_contain_text("not the job's first endpoint")
    expect(page.locator("#rows tr")).to_have_count(3)


def test_the_page_of_the_demo_shows_its_routers(visit: Open, tmp_path: Path) -> None:
    port = free_port()
    arguments = ["--ranks", "1", "--steps", "6", "--every", "2", "--serve", "--port", str(port)]
    demo = [sys.executable, "-m", "moe_telemetry.cli", "demo", *arguments, "--logdir", str(tmp_path / "logs")]
    try:
        with running(demo, tmp_path / "log"):
            seen = visit(scheme="dark")
            wait_until(lambda: b"stay up" in (tmp_path / "log").read_bytes(), "the demo has trained")
            seen.page.goto(f"http://127.0.0.1:{port}/")
            expect(seen.page.locator("#rows tr")).to_have_count(3)
            assert _column(seen.page, "layer") == [f"decoder.{layer}" for layer in (1, 2, 3)]
            expect(seen.page.locator("#window")).to_contain_text("step 6")
            assert _num_colours(_picture(seen.page, "#heatmap")) > 20
            assert (seen.hosts, seen.complaints) == ({f"127.0.0.1:{port}"}, [])
    finally:
        kill_processes_with(str(tmp_path))

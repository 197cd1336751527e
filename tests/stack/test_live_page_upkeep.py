"""The live page while it is open: what it keeps under the pointer, and what it says once nothing new comes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from playwright.sync_api import Page, expect

from moe_telemetry import Snapshot
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter
from tests.stack.live_pages import Open

pytestmark = pytest.mark.stack


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter(port=0)
    exporter.start()
    yield exporter
    exporter.close()


def _show(exporter: PrometheusExporter, snapshot: Snapshot) -> None:
    exporter.export(replace(snapshot, time=time.time()))


def _loads_of_the_first_layer(*loads: int, step: int) -> Snapshot:
    snapshot = make_snapshot(step=step, num_layers=3, num_experts=len(loads))
    key, layer = next(iter(snapshot.layers.items()))
    counts = replace(layer.window["train"], assignments=loads)
    return replace(snapshot, layers={**snapshot.layers, key: replace(layer, window={"train": counts})})


def _seen(page: Page, step: int) -> None:
    expect(page.locator("#window")).to_contain_text(f"step {step}")


def test_a_pointer_that_rests_reads_the_newest_load_and_the_same_time(
    exporter: PrometheusExporter, visit: Open
) -> None:
    for step in (10, 20, 30):
        _show(exporter, _loads_of_the_first_layer(1, 1, 1, 1, step=step))
    page = visit().open(exporter)
    _seen(page, 30)
    page.locator("#heatmap").hover(position={"x": 100, "y": 15})
    expect(page.locator("#tip")).to_have_text("decoder.0, expert 0: 1.00 \u00d7 the mean load")
    _show(exporter, _loads_of_the_first_layer(4, 0, 0, 0, step=40))
    expect(page.locator("#tip")).to_have_text("decoder.0, expert 0: 4.00 \u00d7 the mean load")
    curve = page.locator(".curve[data-measure=max_violation]")
    curve.locator("svg").hover(position={"x": 60, "y": 40})
    pointed = re.compile(r"\d\d:\d\d:\d\d +median \S+ +worst \S+")
    expect(curve.locator("h3")).to_contain_text(pointed)
    _show(exporter, _loads_of_the_first_layer(1, 1, 1, 1, step=50))
    _seen(page, 50)
    expect(curve.locator("h3")).to_contain_text(pointed)
    expect(curve.locator("line.hair")).to_have_attribute("visibility", "visible")
    page.locator("h1").hover()
    expect(curve.locator("h3")).not_to_contain_text("median")
    expect(curve.locator("line.hair")).to_have_attribute("visibility", "hidden")


def test_a_cursor_does_not_stay_on_a_layer_that_the_next_run_has_not(exporter: PrometheusExporter, visit: Open) -> None:
    _show(exporter, make_snapshot(num_layers=12))
    seen = visit()
    page = seen.open(exporter)
    _seen(page, 10)
    page.locator("#heatmap").focus()
    for _ in range(12):
        page.keyboard.press("ArrowDown")
    expect(page.locator("#heat-cell")).to_contain_text("decoder.11, expert 0")
    _show(exporter, make_snapshot(num_layers=2, run="run-2"))
    expect(page.locator("#rows tr")).to_have_count(2)
    expect(page.locator("#heat-cell")).to_have_text("")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#heat-cell")).to_contain_text("decoder.0, expert 0")
    assert seen.complaints == []


def test_what_was_tapped_stays_written_below(exporter: PrometheusExporter, visit: Open) -> None:
    _show(exporter, _loads_of_the_first_layer(1, 1, 1, 1, step=10))
    page = visit().open(exporter)
    _seen(page, 10)
    page.locator("#heatmap").click(position={"x": 100, "y": 15})
    page.locator("h1").hover()
    expect(page.locator("#tip")).to_be_hidden()
    expect(page.locator("#heat-cell")).to_have_text("decoder.0, expert 0: 1.00 \u00d7 the mean load")


def test_the_title_counts_alerts_and_not_the_layers_of_each(exporter: PrometheusExporter, visit: Open) -> None:
    snapshot = make_snapshot(num_layers=8)
    layers = {
        key: replace(layer, window={"train": replace(layer.window["train"], assignments=(0, *[9] * 7))})
        for key, layer in snapshot.layers.items()
    }
    _show(exporter, replace(snapshot, layers=layers))
    page = visit().open(exporter)
    expect(page).to_have_title("(1) run-1 \u00b7 step 10 \u00b7 moe-telemetry")


def test_a_printed_page_has_every_layer(exporter: PrometheusExporter, visit: Open) -> None:
    _show(exporter, make_snapshot(num_layers=61))
    page = visit().open(exporter)
    expect(page.locator("#rows tr")).to_have_count(61)
    hidden = "(() => { const e = document.querySelector('.scroll'); return e.scrollHeight - e.clientHeight; })()"
    assert page.evaluate(hidden) > 0
    page.emulate_media(media="print")
    assert page.evaluate(hidden) == 0


def test_a_run_without_a_counted_token_has_no_axis_and_says_why(exporter: PrometheusExporter, visit: Open) -> None:
    _show(exporter, make_snapshot(window_steps=0))
    page = visit().open(exporter)
    expect(page.locator("#curves")).to_have_text("No token has been counted yet.")
    expect(page.locator("#rows tr")).to_have_count(3)

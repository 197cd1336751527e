"""Pictures and reports: what they show, and what they never do."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moe_telemetry import RouterKey
from moe_telemetry.analysis import Concentration, concentration, drift, predictability
from moe_telemetry.analysis.pictures import DARK, LIGHT, Result, draw, draw_as_one
from moe_telemetry.analysis.report import report
from moe_telemetry.testing import make_trace
from tests.analysis.trace_files import call, write_trace


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    trace = make_trace(tmp_path_factory.mktemp("report"), hidden_size=4, num_steps=3)
    counted = concentration(trace)
    return [counted, predictability(trace), drift(counted, counted)]


def _pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_each_panel_is_a_picture_with_a_name_and_a_text(results: list[Result]) -> None:
    names = [[picture.name for picture in draw(result)] for result in results]
    assert names == [
        ["coverage-train", "load-train"],
        ["recall-train", "cosine-train", "spearman-train", "hot-overlap-train"],
        ["drift"],
    ]
    for result in results:
        for picture in draw(result):
            assert "stage train" in picture.text or picture.name == "drift"
            assert len(np.unique(_pixels(picture.png).reshape(-1, 3), axis=0)) > 3, "an empty picture"


def test_light_and_dark_have_their_backgrounds(results: list[Result]) -> None:
    for theme, corner in ((LIGHT, (255, 255, 255)), (DARK, (13, 17, 23))):
        assert tuple(_pixels(draw_as_one(results[0], theme))[0, 0]) == corner


def test_the_same_figures_make_the_same_bytes(results: list[Result]) -> None:
    assert draw_as_one(results[0]) == draw_as_one(results[0])


def _hot_columns(result: Concentration) -> np.ndarray:
    """Return how yellow each column of the picture of loads is."""
    (picture,) = (picture for picture in draw(result) if picture.name.startswith("load"))
    pixels = _pixels(picture.png).astype(int)
    inside = pixels[pixels.shape[0] // 3 : pixels.shape[0] // 2, : int(pixels.shape[1] * 0.94)]
    return ((inside[..., 0] > 200) & (inside[..., 1] > 200) & (inside[..., 2] < 100)).mean(0)


def test_the_hottest_expert_is_where_its_id_says(tmp_path: Path) -> None:
    places = []
    for expert in (0, 15):
        calls = [call([[expert]] * 50 + [[number] for number in range(16)])]
        columns = _hot_columns(concentration(write_trace(tmp_path / str(expert), calls, num_experts=16)))
        places.append(np.flatnonzero(columns > 0.5).mean() / len(columns))
    assert places[0] < 0.25
    assert places[1] > 0.75


def test_many_layers_and_two_blocks_can_be_drawn(tmp_path: Path) -> None:
    keys = [RouterKey("decoder", layer) for layer in range(1, 62)] + [RouterKey("mtp0", 61)]
    trace = make_trace(tmp_path, keys=keys, num_steps=2, num_tokens=16, num_experts=32)
    assert _pixels(draw_as_one(concentration(trace))).shape[0] > 1500


def test_a_layer_without_load_is_left_out_of_pictures(tmp_path: Path) -> None:
    other = RouterKey("decoder", 1)
    calls = [call([[0]]), call([[1]], other, valid=[False]), call([[1]], other, valid=[False], stage="eval")]
    result = concentration(write_trace(tmp_path, calls))
    assert [picture.name for picture in draw(result)] == ["coverage-train", "load-train"]
    assert "decoder" in report(result, "title")


def test_one_step_has_nothing_to_draw_for_the_step_before(tmp_path: Path) -> None:
    result = predictability(make_trace(tmp_path, hidden_size=4, num_steps=1))
    assert len(draw(result)) == 4


class _Links(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "srcset", "href", "action", "data"}]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_report_asks_for_nothing_else(results: list[Result]) -> None:
    page = _Links()
    page.feed(report(results[0], "A title"))
    assert len(page.links) == 4
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert page.tags.isdisjoint({"script", "link", "iframe", "object"})
    style = "".join(text for text in page.text if "color-scheme" in text)
    assert not re.search(r"url\(|@import", style)


def test_a_report_has_pictures_for_light_and_dark(results: list[Result]) -> None:
    page = report(results[1], "A title")
    pictures = [base64.b64decode(text) for text in re.findall(r"data:image/png;base64,([^\"]+)", page)]
    assert [tuple(_pixels(png)[0, 0]) for png in pictures] == [(13, 17, 23), (255, 255, 255)] * 4
    assert page.count("prefers-color-scheme: dark") == 5


def test_a_report_has_the_figures_and_says_what_is_missing(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, is_complete=False)
    counted = concentration(trace)
    page = report(counted, "A title")
    assert f"<td>{counted.layers[0].coverage():.4f}</td>" in page
    assert "ranks whose capture has not ended" in page


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    odd = '<script>alert("x")</script> & $_x^$'
    write_trace(tmp_path / '<b>"&', [call([[0]], stage=odd, key=RouterKey("<i>", 0))])
    page = report(concentration(tmp_path / '<b>"&'), "<title>")
    parsed = _Links()
    parsed.feed(page)
    assert parsed.tags.isdisjoint({"script", "b", "i"})
    assert any(odd in text for text in parsed.text)

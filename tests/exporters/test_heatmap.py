"""The picture of all experts' load: its cells, its colours, its bounds."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from moe_telemetry import RouterKey, Snapshot
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.heatmap import Heatmap, heatmaps
from moe_telemetry_exporters.shades import ABSENT, DEAD, LEGEND, PALETTE, merged, shade_of, shades_of

Colour = tuple[int, int, int]


def _colour(shade: int) -> Colour:
    red, green, blue = PALETTE[3 * shade : 3 * shade + 3]
    return red, green, blue


def _with_loads(*rows: tuple[int, ...]) -> Snapshot:
    snapshot = make_snapshot(num_layers=1)
    (layer,) = snapshot.layers.values()
    layers = {
        RouterKey("decoder", place): replace(
            layer, num_experts=len(row), window={"train": replace(layer.window["train"], assignments=row)}
        )
        for place, row in enumerate(rows)
    }
    return replace(snapshot, layers=layers)


def _only(snapshot: Snapshot) -> Heatmap:
    (picture,) = heatmaps(snapshot)
    return picture


def _pixels(picture: Heatmap) -> Image.Image:
    with Image.open(io.BytesIO(picture.png)) as image:
        assert image.format == "PNG"
        assert image.size == (picture.width, picture.height)
        return image.convert("RGB")


def _rows_of_cells(snapshot: Snapshot, left: int, top: int, cell: tuple[int, int]) -> list[list[Colour]]:
    """Return the colour in the middle of every cell."""
    image = _pixels(_only(snapshot))
    widest = max(layer.num_experts for layer in snapshot.layers.values())
    return [
        [
            image.getpixel((left + column * cell[0] + cell[0] // 2, top + row * cell[1] + cell[1] // 2))  # type: ignore[misc]
            for column in range(widest)
        ]
        for row in range(len(snapshot.layers))
    ]


def _origin(picture: Heatmap) -> tuple[int, int]:
    """Return the corner of the cells: the first pixel with the colour of an expert without a token."""
    image = _pixels(picture)
    return next(
        (x, y) for y in range(image.height) for x in range(image.width) if image.getpixel((x, y)) == _colour(DEAD)
    )


def test_a_cell_has_the_colour_of_its_load_over_the_mean_and_layers_keep_their_order() -> None:
    snapshot = _with_loads((0, 10, 20, 10), (0, 10, 40, 30), (1, 1, 1, 1))
    left, top = _origin(_only(snapshot))
    rows = _rows_of_cells(snapshot, left, top, (40, 24))
    assert rows[0] == [_colour(DEAD), _colour(shade_of(1)), _colour(shade_of(2)), _colour(shade_of(1))]
    assert rows[1] == [_colour(DEAD), _colour(shade_of(0.5)), _colour(shade_of(2)), _colour(shade_of(1.5))]
    assert rows[2] == [_colour(shade_of(1))] * 4


def test_a_layer_with_fewer_experts_ends_in_grey_and_one_that_placed_nothing_is_grey() -> None:
    snapshot = _with_loads((0, 1, 1, 2), (1, 1), (0, 0, 0, 0))
    left, top = _origin(_only(snapshot))
    rows = _rows_of_cells(snapshot, left, top, (40, 24))
    assert rows[1] == [_colour(shade_of(1))] * 2 + [_colour(ABSENT)] * 2
    assert rows[2] == [_colour(ABSENT)] * 4


def test_each_stage_has_a_picture_and_training_comes_first() -> None:
    assert [picture.stage for picture in heatmaps(make_snapshot(stages=("eval", "train")))] == ["train", "eval"]
    assert list(heatmaps(make_snapshot(window_steps=0))) == []


def test_a_layer_that_a_stage_did_not_see_keeps_its_row() -> None:
    snapshot = make_snapshot(stages=("train", "eval"))
    key, layer = next(iter(snapshot.layers.items()))
    without = replace(layer, window={"train": layer.window["train"]})
    sizes = [
        [(picture.width, picture.height) for picture in heatmaps(each)]
        for each in (snapshot, replace(snapshot, layers={**snapshot.layers, key: without}))
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "most_bytes"),
    [(3, 8, 8_000), (61, 256, 48_000), (2, 4096, 16_000), (200, 16, 48_000)],
)
def test_its_size_is_bounded(num_layers: int, num_experts: int, most_bytes: int) -> None:
    picture = _only(make_snapshot(num_layers=num_layers, num_experts=num_experts, tokens_per_step=4 * num_experts))
    assert len(picture.png) < most_bytes
    assert 300 < picture.width < 1200
    assert 100 < picture.height < 900


def test_any_text_can_be_a_stage_or_a_block() -> None:
    odd = 'a"b\\c\nd{e}=100%s [red],é漢🙂' * 4
    snapshot = make_snapshot(stages=(odd,))
    layers = {RouterKey(odd, key.layer): layer for key, layer in snapshot.layers.items()}
    picture = _only(replace(snapshot, layers=layers))
    assert picture.stage == odd
    assert picture.width < 1200


def test_shades_are_even_in_factors_and_stop_at_four() -> None:
    assert [shade_of(load) for load in (0.01, 0.25, 0.5, 1, 2, 4, 100)] == [0, 0, 30, 60, 90, 120, 120]
    assert list(shades_of((0, 5, 15, 0))) == [DEAD, 60, 108, DEAD]
    assert list(shades_of((0, 0))) == [ABSENT, ABSENT]


def test_experts_that_share_a_pixel_show_the_one_farthest_from_the_mean() -> None:
    assert list(merged(bytes([60, 61, 59, 90, DEAD, 60, 62]), 3)) == [61, DEAD, 62]
    assert merged(b"\x01\x02", 1) == b"\x01\x02"


def test_colours_of_the_legend_differ_in_brightness_or_in_blue_for_every_kind_of_sight() -> None:
    """Red and green alike, as with the commonest colour blindness, all of them can still be told apart."""
    seen = [((red + green) // 2, blue) for red, green, blue in (_colour(shade) for _, shade in LEGEND)]
    for place, one in enumerate(seen):
        for other in seen[place + 1 :]:
            assert max(abs(one[0] - other[0]), abs(one[1] - other[1])) > 25

"""A picture of the load of every expert: a row a layer, a column an expert, colour for load over the layer's mean.

    for picture in heatmaps(snapshot):
        Path(f"{picture.stage}.png").write_bytes(picture.png)

Blue is below the mean, orange above it, white the mean, black an expert without a token, grey no expert: colours
that all kinds of sight tell apart. A step of colour is a factor, not a difference, since 1/2 and 2 are equally far
from balanced.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from moe_telemetry.snapshot import Snapshot
from moe_telemetry.summary import tokens_by_stage
from moe_telemetry_exporters.heatmap_text import FONT, printable, text_width
from moe_telemetry_exporters.shades import ABSENT, LEGEND, NUM_COLOURS, PALETTE, merged, shades_of

__all__ = ["Heatmap", "heatmaps"]

_MAX_WIDTH, _MAX_HEIGHT = 1024, 768
"""Pixels of all cells together, which bounds the bytes."""
_WIDEST, _HIGHEST = 40, 24
_MARGIN, _LINE, _SWATCH = 6, 14, 10
_INK, _PAPER = 40, 255
_COLUMN_LABEL_WIDTH = 28

Row = tuple[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heatmap:
    """One picture of one stage."""

    stage: str
    width: int
    height: int
    png: bytes


def heatmaps(snapshot: Snapshot) -> Iterator[Heatmap]:
    """Yield a picture of each stage that saw a token in the window, `train` first."""
    for stage in sorted(tokens_by_stage(snapshot, "window"), key=lambda name: name != "train"):
        title = f"step {snapshot.step}, {stage}: load of experts (columns) over the mean of their layer"
        image = _draw([(str(key), loads) for key, loads in _loads(snapshot, stage)], title)
        with io.BytesIO() as buffer:
            image.save(buffer, format="PNG")
            yield Heatmap(stage=stage, width=image.width, height=image.height, png=buffer.getvalue())


def _loads(snapshot: Snapshot, stage: str) -> Iterator[tuple[object, Sequence[int]]]:
    """Yield the window's assignments of every layer; zeros where the layer saw nothing in this stage."""
    for key, layer in snapshot.layers.items():
        yield key, layer.window[stage].assignments if stage in layer.window else (0,) * layer.num_experts


def _draw(rows: Sequence[Row], title: str) -> Image.Image:
    """Return title, labelled cells and legend as one image of 256 colours."""
    labels = [printable(label, longest=16) for label, _ in rows]
    title = printable(title, longest=120)
    cells = _cells([assignments for _, assignments in rows])
    left, top = 2 * _MARGIN + max(map(text_width, labels)), _MARGIN + _LINE
    bottom = top + cells.height
    width = max(left + cells.width, _MARGIN + text_width(title), left + _legend_width()) + _MARGIN
    # text is drawn in shades of grey, which then become the upper half of the palette
    page = Image.new("L", (width, bottom + 2 * _LINE + 2 * _MARGIN), _PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((_MARGIN, _MARGIN - 2), title, _INK, FONT)
    _label_rows(draw, labels, left - _MARGIN, top, cells.height)
    _label_columns(draw, max(len(assignments) for _, assignments in rows), left, bottom + 1, cells.width)
    places = _draw_legend(draw, left, bottom + _LINE + _MARGIN)
    image = page.point([NUM_COLOURS + grey // 2 for grey in range(256)])
    image.paste(cells, (left, top))
    for box, shade in places:
        image.paste(shade, box)
    image.putpalette(PALETTE)
    return image


def _cells(rows: Sequence[Sequence[int]]) -> Image.Image:
    """Return the shade of every cell, each some pixels large; where there are too many, experts share pixels."""
    num_experts = max(map(len, rows))
    experts_of_column = math.ceil(num_experts / _MAX_WIDTH)
    num_columns = math.ceil(num_experts / experts_of_column)
    shades = [merged(shades_of(row), experts_of_column) for row in rows]
    indices = b"".join(row.ljust(num_columns, bytes([ABSENT])) for row in shades)
    size = num_columns * _scale(num_columns, _WIDEST, _MAX_WIDTH), len(rows) * _scale(len(rows), _HIGHEST, _MAX_HEIGHT)
    return Image.frombytes("L", (num_columns, len(rows)), indices).resize(size, Image.Resampling.NEAREST)


def _scale(count: int, largest: int, most: int) -> int:
    return max(1, min(largest, most // count))


def _label_rows(draw: ImageDraw.ImageDraw, labels: Sequence[str], right: int, top: int, height: int) -> None:
    """Write the names of layers beside their rows, as many as there is room for."""
    row = height / len(labels)
    for place in range(0, len(labels), math.ceil(0.85 * _LINE / row)):
        draw.text((right, top + (place + 0.5) * row), labels[place], _INK, FONT, anchor="rm")


def _label_columns(draw: ImageDraw.ImageDraw, num_experts: int, left: int, top: int, width: int) -> None:
    """Write numbers of experts under their columns: round ones, far enough apart."""
    column = width / num_experts
    strides = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    stride = next(stride for stride in strides if stride * column > _COLUMN_LABEL_WIDTH)
    for expert in range(0, num_experts, stride):
        draw.text((left + (expert + 0.5) * column, top), str(expert), _INK, FONT, anchor="ma")


def _legend_width() -> int:
    return sum(_LINE + text_width(text) + 2 * _MARGIN for text, _ in LEGEND)


def _draw_legend(draw: ImageDraw.ImageDraw, left: int, top: int) -> list[tuple[tuple[int, int, int, int], int]]:
    """Write the legend, and return where its colours go: (box, shade)."""
    places = []
    for text, shade in LEGEND:
        draw.rectangle((left, top, left + _SWATCH + 1, top + _SWATCH + 1), outline=_INK)
        draw.text((left + _LINE + 2, top - 1), text, _INK, FONT)
        places.append(((left + 1, top + 1, left + _SWATCH + 1, top + _SWATCH + 1), shade))
        left += _LINE + text_width(text) + 2 * _MARGIN
    return places

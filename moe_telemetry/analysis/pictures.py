"""Pictures of an analysis: coverage curves, loads by layer and expert, predictability by layer.

    for picture in draw(concentration("trace")):
        Path(f"{picture.name}.png").write_bytes(picture.png)

Drawn by matplotlib without a display and without its global state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moe_telemetry.analysis.concentration import Concentration, LayerConcentration
from moe_telemetry.analysis.drift import Drift, LayerDrift
from moe_telemetry.analysis.pair import PairPredictability
from moe_telemetry.analysis.predictability import Predictability

__all__ = ["DARK", "LIGHT", "Picture", "Result", "Theme", "draw", "draw_as_one"]

Result = Concentration | Predictability | Drift
"""What can be drawn."""

_DPI = 144
_WIDTH = 8.0
"""Inches of a panel."""
_LETTERS = 90
"""Of names side by side below a panel."""
_LOAD_CAP = 4.0
"""Load over the mean from which the colour stays the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """Colours of a picture."""

    background: str
    text: str
    faint: str
    main: str
    other: str
    ramp: str
    """Colour map of what grows with the depth or with the load."""


LIGHT = Theme(background="#ffffff", text="#1f2328", faint="#8c959f", main="#0969da", other="#bc4c00", ramp="viridis")
DARK = Theme(background="#0d1117", text="#e6edf3", faint="#6e7681", main="#58a6ff", other="#f0883e", ramp="viridis")


class Picture(NamedTuple):
    """One picture as a PNG file."""

    name: str
    """Good for a file."""
    text: str
    """What it shows, for those who do not see it."""
    png: bytes


class _Panel(NamedTuple):
    name: str
    text: str
    height: float
    paint: Callable[[Any, Theme], None]
    """Draws on axes of matplotlib."""


def draw(result: Result, theme: Theme = LIGHT) -> list[Picture]:
    """Return the pictures of a result, one a panel."""
    return [Picture(panel.name, panel.text, _render([panel], theme)) for panel in _panels(result)]


def draw_as_one(result: Result, theme: Theme = LIGHT) -> bytes:
    """Return all panels of a result, one below the other, as one PNG file."""
    return _render(list(_panels(result)), theme)


def _render(panels: Sequence[_Panel], theme: Theme) -> bytes:
    colours = {
        "figure.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.faint,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.faint,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        # names of stages and blocks are plain text, whatever they hold
        "text.parse_math": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.text),
    }
    with mpl.rc_context(colours):
        heights = [panel.height for panel in panels]
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained", dpi=_DPI)
        rows = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for panel, (axes,) in zip(panels, rows, strict=True):
            panel.paint(axes, theme)
        content = io.BytesIO()
        # no version of matplotlib in the file: the same figures make the same bytes
        FigureCanvasAgg(figure).print_png(content, metadata={"Software": None})
    return content.getvalue()


def _panels(result: Result) -> Iterator[_Panel]:
    if isinstance(result, Drift):
        yield _drift_panel(result.layers)
        return
    if isinstance(result, Concentration):
        for stage, layers in groupby(result.layers, lambda layer: layer.stage):
            yield from _concentration_panels(stage, [layer for layer in layers if layer.coverage_curve])
        return
    for stage, pairs in groupby(result.pairs, lambda pair: pair.stage):
        yield from _predictability_panels(stage, [pair for pair in pairs if pair.tokens])


def _concentration_panels(stage: str, layers: Sequence[LayerConcentration]) -> Iterator[_Panel]:
    if not layers:
        return
    name = _file_name(stage)
    yield _Panel(
        f"coverage-{name}",
        f"Share of the assignments that the hottest experts take, a line a router; stage {stage}.",
        3.6,
        lambda axes, theme: _paint_coverage(axes, theme, stage, layers),
    )
    yield _Panel(
        f"load-{name}",
        f"Load of each expert over the mean of its router, a row a router; stage {stage}.",
        1.6 + min(8.0, 0.14 * len(layers)),
        lambda axes, theme: _paint_load(axes, theme, stage, layers),
    )


def _predictability_panels(stage: str, pairs: Sequence[PairPredictability]) -> Iterator[_Panel]:
    if not pairs:
        return
    name = _file_name(stage)
    yield _Panel(
        f"recall-{name}",
        f"Share of the choices of each router that were predicted one layer earlier; stage {stage}.",
        2.6,
        lambda axes, theme: _paint_recall(axes, theme, stage, pairs),
    )
    for key, title in (("cosine", "cosine of the load"), ("spearman", "rank correlation"), ("hot_overlap", "hot")):
        yield _Panel(
            f"{key.replace('_', '-')}-{name}",
            f"{title}: predicted one layer earlier, and by the step before, against the actual load; stage {stage}.",
            2.4,
            lambda axes, theme, key=key: _paint_likeness(axes, theme, stage, pairs, key),  # type: ignore[misc]
        )


def _drift_panel(layers: Sequence[LayerDrift]) -> _Panel:
    return _Panel(
        "drift",
        "Total variation distance and overlap of the hottest experts of two traces, by router.",
        3.0,
        lambda axes, theme: _paint_drift(axes, theme, layers),
    )


def _paint_coverage(axes: Any, theme: Theme, stage: str, layers: Sequence[LayerConcentration]) -> None:  # noqa: ANN401
    colours = mpl.colormaps[theme.ramp](np.linspace(0.1, 0.9, len(layers)))
    for layer, colour in zip(layers, colours, strict=True):
        curve = layer.coverage_curve or ()
        share = np.arange(1, len(curve) + 1) / len(curve)
        axes.plot(share, curve, color=colour, linewidth=1.2, label=str(layer.router))
    axes.plot((0, 1), (0, 1), color=theme.faint, linestyle="--", linewidth=1, label="balanced")
    axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="share of the experts, hottest first", ylabel="share of assignments")
    axes.set_title(f"What the hottest experts take (stage {stage})")
    axes.grid(visible=True)
    if len(layers) <= 8:
        axes.legend(loc="lower right", fontsize=8)
    else:
        _depth_bar(axes, theme, layers)


def _depth_bar(axes: Any, theme: Theme, layers: Sequence[LayerConcentration]) -> None:  # noqa: ANN401
    scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, len(layers) - 1), mpl.colormaps[theme.ramp])
    bar = axes.figure.colorbar(scale, ax=axes, ticks=_some(len(layers)))
    bar.ax.set_yticklabels([str(layers[index].router) for index in _some(len(layers))])
    bar.outline.set_visible(False)


def _paint_load(axes: Any, theme: Theme, stage: str, layers: Sequence[LayerConcentration]) -> None:  # noqa: ANN401
    most = max(layer.num_experts for layer in layers)
    loads = np.full((len(layers), most), np.nan)
    for row, layer in enumerate(layers):
        loads[row, : layer.num_experts] = np.array(layer.assignments) * layer.num_experts / sum(layer.assignments)
    # beyond the cap all is hot; without one, a single expert would turn the others dark
    image = axes.imshow(loads, aspect="auto", interpolation="nearest", cmap=theme.ramp, vmin=0, vmax=_LOAD_CAP)
    axes.set(xlabel="expert", yticks=_some(len(layers)))
    axes.set_yticklabels([str(layers[index].router) for index in _some(len(layers))])
    axes.set_title(f"Load over the mean of the router, 1 is balanced (stage {stage})")
    axes.figure.colorbar(image, ax=axes, extend="max").outline.set_visible(False)


def _paint_recall(axes: Any, theme: Theme, stage: str, pairs: Sequence[PairPredictability]) -> None:  # noqa: ANN401
    _line(axes, [pair.recall for pair in pairs], theme.main, "predicted one layer earlier")
    _line(axes, [pair.chance_recall for pair in pairs], theme.faint, "by chance", style="--")
    _finish_by_layer(axes, [str(pair.router) for pair in pairs], "recall of the choices")
    axes.set_title(f"Choices that were known one layer earlier (stage {stage})")


def _paint_likeness(
    axes: Any,  # noqa: ANN401
    theme: Theme,
    stage: str,
    pairs: Sequence[PairPredictability],
    key: str,
) -> None:
    titles = {"cosine": "Cosine", "spearman": "Rank correlation", "hot_overlap": "Overlap of the hottest experts"}
    _line(axes, [getattr(pair.prediction, key) for pair in pairs], theme.main, "predicted one layer earlier")
    _line(axes, [getattr(pair.last_step, key) for pair in pairs], theme.other, "the step before")
    _finish_by_layer(axes, [str(pair.router) for pair in pairs], titles[key].lower())
    axes.set_title(f"{titles[key]}: predicted and actual load (stage {stage})")


def _paint_drift(axes: Any, theme: Theme, layers: Sequence[LayerDrift]) -> None:  # noqa: ANN401
    _line(axes, [layer.total_variation for layer in layers], theme.other, "total variation distance")
    _line(axes, [layer.hot_overlap for layer in layers], theme.main, "hottest experts in both")
    stages = {layer.stage for layer in layers}
    names = [str(layer.router) if len(stages) == 1 else f"{layer.router} {layer.stage}" for layer in layers]
    _finish_by_layer(axes, names, "share")
    axes.set_title("Drift of the load between two traces")


def _line(axes: Any, values: Sequence[float | None], colour: str, label: str, style: str = "-") -> None:  # noqa: ANN401
    heights = [np.nan if value is None else value for value in values]
    axes.plot(heights, style, color=colour, label=label, marker="o", markersize=3, linewidth=1.4)


def _finish_by_layer(axes: Any, names: Sequence[str], label: str) -> None:  # noqa: ANN401
    shown = _some(len(names), min(10, max(1, _LETTERS // (3 + max(map(len, names))))))
    axes.set(xticks=shown, ylabel=label)
    axes.set_xticklabels([names[index] for index in shown])
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), max(1.02, high))
    axes.grid(visible=True)
    axes.legend(loc="best", fontsize=8)


def _some(count: int, most: int = 10) -> list[int]:
    """Return at most so many indices, evenly spread, the first among them."""
    return list(range(0, count, -(-count // most)))


def _file_name(stage: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in stage)

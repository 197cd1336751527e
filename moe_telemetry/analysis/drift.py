"""Drift: how far the load of two traces lies apart, router by router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moe_telemetry.analysis.concentration import Concentration, LayerConcentration
from moe_telemetry.analysis.frames import Columns, FrameSource
from moe_telemetry.analysis.measures import hottest, jensen_shannon, total_variation
from moe_telemetry.errors import TraceError
from moe_telemetry.identity import RouterKey

__all__ = ["Drift", "LayerDrift", "drift"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerDrift:
    """The distance of one router's loads in one stage; None where one of them is empty."""

    stage: str
    router: RouterKey
    num_experts: int
    top: int
    total_variation: float | None
    """Share of the assignments that would have to go elsewhere, 0 to 1."""
    jensen_shannon: float | None
    """Jensen-Shannon divergence in bits, 0 to 1."""
    hot_overlap: float | None
    """Share of the hottest experts that are the hottest in both."""


@dataclass(frozen=True, kw_only=True)
class Drift(FrameSource):
    """The drift of every router that both traces have in the same stage."""

    before: str
    after: str
    layers: tuple[LayerDrift, ...]
    notes: tuple[str, ...] = ()

    def columns(self) -> Columns:
        """Return a row a router."""
        return Columns(tuple(_row(self.layers[0])), [tuple(_row(layer).values()) for layer in self.layers])

    def as_dict(self) -> dict[str, object]:
        """Return all figures as plain values, for JSON."""
        layers = [_row(layer) for layer in self.layers]
        return {"before": self.before, "after": self.after, "notes": self.notes, "layers": layers}


def drift(before: Concentration, after: Concentration) -> Drift:
    """Return how far the loads of two traces lie apart.

    Raises:
        TraceError: they have no router in common, or one has another number of experts.
    """
    others = {(layer.stage, layer.router): layer for layer in after.layers}
    common = [
        (layer, others[layer.stage, layer.router]) for layer in before.layers if (layer.stage, layer.router) in others
    ]
    if not common:
        raise TraceError(
            f"the traces have no router and stage in common: {before.trace} has {_names(before)}; "
            f"{after.trace} has {_names(after)}"
        )
    layers = tuple(_of_layer(*pair) for pair in common)
    return Drift(before=before.trace, after=after.trace, layers=layers, notes=tuple(_notes(before, after)))


def _of_layer(before: LayerConcentration, after: LayerConcentration) -> LayerDrift:
    if before.num_experts != after.num_experts:
        raise TraceError(
            f"{before.router} has {before.num_experts} experts in one trace and {after.num_experts} in the other; "
            "expected traces of one architecture"
        )
    one, other = (hottest(np.array(layer.assignments), before.top) for layer in (before, after))
    return LayerDrift(
        stage=before.stage,
        router=before.router,
        num_experts=before.num_experts,
        top=before.top,
        total_variation=total_variation(before.assignments, after.assignments),
        jensen_shannon=jensen_shannon(before.assignments, after.assignments),
        hot_overlap=len(one & other) / max(len(one), len(other)) if one and other else None,
    )


def _notes(before: Concentration, after: Concentration) -> Iterator[str]:
    for mine, other in ((before, after), (after, before)):
        if alone := _groups(mine) - _groups(other):
            yield f"only in {mine.trace}: {', '.join(f'{key} ({stage})' for stage, key in sorted(alone)[:4])}" + (
                f" and {len(alone) - 4} more" if len(alone) > 4 else ""
            )


def _groups(result: Concentration) -> set[tuple[str, RouterKey]]:
    return {(layer.stage, layer.router) for layer in result.layers}


def _names(result: Concentration) -> str:
    shown = ", ".join(f"{layer.router} ({layer.stage})" for layer in result.layers[:3])
    return shown if len(result.layers) <= 3 else f"{shown} and {len(result.layers) - 3} more"


def _row(layer: LayerDrift) -> dict[str, object]:
    return {
        "stage": layer.stage,
        "block": layer.router.block,
        "layer": layer.router.layer,
        "num_experts": layer.num_experts,
        "top": layer.top,
        "total_variation": layer.total_variation,
        "jensen_shannon": layer.jensen_shannon,
        "hot_overlap": layer.hot_overlap,
    }

"""What a route trace tells: which experts are hot, whether they stay hot, and whether a layer's load is predictable.

    from moe_telemetry.analysis import concentration, predictability, read_trace

    concentration("trace", stage="train").to_polars()
    read_trace("trace").filter(pl.col("layer") == 3).collect()

Needs `pip install 'moe-telemetry[trace]'`.
"""

from __future__ import annotations

from moe_telemetry.analysis.concentration import Concentration, LayerConcentration, concentration
from moe_telemetry.analysis.drift import Drift, LayerDrift, drift
from moe_telemetry.analysis.frames import read_trace
from moe_telemetry.analysis.pair import Likeness, PairPredictability
from moe_telemetry.analysis.predictability import Predictability, predictability

__all__ = [
    "Concentration",
    "Drift",
    "LayerConcentration",
    "LayerDrift",
    "Likeness",
    "PairPredictability",
    "Predictability",
    "concentration",
    "drift",
    "predictability",
    "read_trace",
]

"""What routers' scores say: a compact tensor per sequence, and sums that cross ranks exactly."""

from __future__ import annotations

from moe_telemetry.diagnostics.distribution import ScoreFunction, ScoreKind, as_probabilities
from moe_telemetry.diagnostics.microbatch import microbatch_load
from moe_telemetry.diagnostics.sequence import (
    ROUTER_DIAGNOSTIC_CHANNEL_COUNT,
    RouterDiagnosticChannel,
    build_router_diagnostics,
)
from moe_telemetry.diagnostics.streaming import ScoreTally, bias_maxima, score_tally

__all__ = [
    "ROUTER_DIAGNOSTIC_CHANNEL_COUNT",
    "RouterDiagnosticChannel",
    "ScoreFunction",
    "ScoreKind",
    "ScoreTally",
    "as_probabilities",
    "bias_maxima",
    "build_router_diagnostics",
    "microbatch_load",
    "score_tally",
]

"""Expert routes of a rollout: to hold them, to check them against the router, to say how they are wrong."""

from moe_telemetry.replay.classes import RowClass, classify_rows, usable_rows
from moe_telemetry.replay.comparison import (
    RouteComparison,
    RowComparison,
    combine_counts,
    compare_routes,
    compare_rows,
)
from moe_telemetry.replay.misalignment import Misalignment, locate_misalignment
from moe_telemetry.replay.order import TokenOrder, previous_rows, token_order
from moe_telemetry.replay.routes import Routes
from moe_telemetry.replay_totals import REPLAY_COUNTERS, ReplayTotals, pooled_agreement

__all__ = [
    "REPLAY_COUNTERS",
    "Misalignment",
    "ReplayTotals",
    "RouteComparison",
    "Routes",
    "RowClass",
    "RowComparison",
    "TokenOrder",
    "classify_rows",
    "combine_counts",
    "compare_routes",
    "compare_rows",
    "locate_misalignment",
    "pooled_agreement",
    "previous_rows",
    "token_order",
    "usable_rows",
]

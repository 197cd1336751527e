"""Trace: what `monitor.trace(...)` returns, from its start to the last file."""

from __future__ import annotations

from collections.abc import Mapping

from moe_telemetry.identity import RouterKey
from moe_telemetry.taps import Tap
from moe_telemetry.trace.manifest import TracedRouter

__all__ = ["traced_routers"]


def traced_routers(taps: Mapping[RouterKey, Tap]) -> list[TracedRouter]:
    """Return what a trace says of the routers of this rank."""
    return [
        TracedRouter(
            key=key,
            num_experts=tap.site.num_experts,
            top_k=tap.site.top_k,
            score_function=tap.site.score_function,
            is_biased=tap.site.is_biased,
        )
        for key, tap in taps.items()
    ]

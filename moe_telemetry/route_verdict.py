"""Whether a window's replay is misaligned, as one sentence for the log."""

from __future__ import annotations

from collections.abc import Mapping

from moe_telemetry.config import TelemetryConfig
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay_totals import ReplayTotals

__all__ = ["complaint"]

Checks = Mapping[RouterKey, ReplayTotals]


def complaint(checks: Checks, config: TelemetryConfig) -> str | None:
    """Return what is wrong with the replay of these layers, or None where nothing is.

    The worst layer counts: most tokens without a common expert, else the least agreement, which shows
    where zero overlap is blind. Layers with fewer than `replay_min_checked` checked tokens are not judged.
    """
    most = max((replay.replayed for replay in checks.values()), default=0)
    if most and not any(replay.checked for replay in checks.values()):
        return f"routes were replayed for {most} tokens and none of them could be checked (coverage 0)"
    judged = {key: replay for key, replay in checks.items() if replay.checked >= config.replay_min_checked}
    return _strangers(judged, config.replay_warn_zero_overlap) or _disagreement(judged, config.replay_warn_agreement)


def _strangers(judged: Checks, limit: float) -> str | None:
    above = {key: ratio for key, replay in judged.items() if (ratio := replay.zero_overlap_ratio or 0.0) > limit}
    if not above:
        return None
    worst = max(above, key=lambda key: above[key])
    return (
        f"{above[worst]:.1%} of the replayed tokens of {worst} share no expert with the router's own choice "
        f"(limit {limit:.1%}; {len(above)} of {len(judged)} layers above it): the routes may be of other tokens"
    )


def _disagreement(judged: Checks, limit: float) -> str | None:
    below = {key: ratio for key, replay in judged.items() if (ratio := replay.agreement or 0.0) < limit}
    if not below:
        return None
    worst = min(below, key=lambda key: below[key])
    return (
        f"the replayed routes of {worst} agree with the router's own choice by {below[worst]:.1%} only "
        f"(limit {limit:.1%}; {len(below)} of {len(judged)} layers below it): the routes may be of other tokens"
    )

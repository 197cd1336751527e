"""What an alert draws into a panel: the limit of its rule, and on which side of it things are well."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.models.dashboard import Threshold, ThresholdsMode

from moe_telemetry.alerts import RULES

__all__ = ["soft_range", "thresholds"]


_BAD_BELOW = {"MoeReplayAgreementLow", "MoeReplayCoverageLow", "MoeRouterEntropyCollapsed"}


def thresholds(alert: str | None) -> ThresholdsConfig:
    """Return the colours of a panel: red where its alert is met, green elsewhere."""
    if alert is None:
        steps = [Threshold(value=None, color="green")]
    else:
        below, above = ("red", "green") if alert in _BAD_BELOW else ("green", "red")
        steps = [Threshold(value=None, color=below), Threshold(value=float(RULES[alert].limit), color=above)]
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def soft_range(alert: str | None) -> tuple[float, float] | None:
    """Return what an axis shows at least, so that healthy lines are seen beside the limit; None for any axis."""
    # a healthy run is seconds old, and its limit a quarter of an hour: both on one axis would be a flat line
    if alert is None or alert == "MoeTelemetryStalled":
        return None
    limit = RULES[alert].limit
    return (limit * 0.9, 1.0) if alert in _BAD_BELOW else (0.0, limit * 1.25)

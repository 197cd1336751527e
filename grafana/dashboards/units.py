"""Units of the table of metrics (UCUM) as units that Grafana knows."""

from __future__ import annotations

from moe_telemetry.metric import Metric

__all__ = ["unit_of"]

# annotations such as {token} are counts; Grafana has no such units, and `short` writes 12000 as 12 K
_COUNT, _SHARE, _NUMBER = "short", "percentunit", "none"

# ratios of which 1 is not "all of it"
_NO_SHARES = {
    "moe_balance_loss_ratio",
    "moe_ep_straggler_ratio",
    "moe_expert_relative_load",
    "moe_load_cv_ratio",
    "moe_load_gini_ratio",
    "moe_load_max_violation_ratio",
    "moe_load_microbatch_max_violation_ratio",
    "moe_load_min_violation_ratio",
}


def unit_of(metric: Metric) -> str:
    """Return the unit of a panel that shows this metric as it is."""
    if metric.unit == "s":
        return "s"
    if metric.unit == "{step}":
        return _NUMBER
    if metric.unit != "1":
        return _COUNT
    is_share = metric.name.endswith("_ratio") and metric.name not in _NO_SHARES
    return _SHARE if is_share else _NUMBER

"""Names of numbers in W&B and TensorBoard, and the charts that both show first.

    moe/<metric>/<block>.<layer>            a layer, of stage train, as moe/load_max_violation_ratio/decoder.3
    moe/<metric>/{mean,max,min,p90}         over the layers
    moe/<metric>                            of the job as a whole, as moe/telemetry_routers_observed
    moe/<metric>/<stage>/...                of every other stage

`<metric>` is the name in `METRICS` without `moe_` and `_total`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BY_LAYER", "FIRST_LOOK", "Chart", "Section", "tag"]

BY_LAYER = frozenset(
    {
        "moe_load_dead_experts",
        "moe_load_entropy_ratio",
        "moe_load_max_violation_ratio",
        "moe_replay_agreement_ratio",
        "moe_replay_zero_overlap_ratio",
        "moe_router_tokens_total",
        "moe_score_entropy_ratio",
    }
)
"""Metrics that have a number for every layer: what one looks at first. All others have their spread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines in one picture, over the training step."""

    title: str
    pattern: str
    """A regular expression for the tags of its lines, in a form that Python, Go and JavaScript share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Charts under one heading."""

    title: str
    charts: tuple[Chart, ...]


def tag(metric: str, last: str = "", *, stage: str = "train") -> str:
    """Return the tag of a number of a metric; `last` is a layer, a word for a spread, or nothing."""
    name = metric.removeprefix("moe_").removesuffix("_total")
    return "/".join(part for part in ("moe", name, "" if stage == "train" else stage, last) if part)


def _layers(title: str, metric: str) -> Chart:
    return Chart(title=title, pattern=rf"^{tag(metric)}/[^/]+\.[0-9]+$")


def _spread(title: str, metric: str) -> Chart:
    return Chart(title=title, pattern=f"^{tag(metric)}/(mean|max|min|p90)$")


def _job(title: str, pattern: str) -> Chart:
    return Chart(title=title, pattern=f"^moe/{pattern}$")


FIRST_LOOK = (
    Section(
        title="Load",
        charts=(
            _layers("MaxVio by layer", "moe_load_max_violation_ratio"),
            _layers("Dead experts by layer", "moe_load_dead_experts"),
            _layers("Load entropy by layer", "moe_load_entropy_ratio"),
            _spread("MaxVio over layers", "moe_load_max_violation_ratio"),
        ),
    ),
    Section(
        title="Scores",
        charts=(
            _layers("Score entropy by layer", "moe_score_entropy_ratio"),
            _spread("Top-k boundary margin over layers", "moe_topk_boundary_margin_ratio"),
            _spread("Largest logit over layers", "moe_logit_max"),
            _spread("Router z over layers", "moe_router_z"),
        ),
    ),
    Section(
        title="Replay",
        charts=(
            _layers("Agreement by layer", "moe_replay_agreement_ratio"),
            _layers("Zero overlap by layer", "moe_replay_zero_overlap_ratio"),
            _spread("Coverage over layers", "moe_replay_coverage_ratio"),
        ),
    ),
    Section(
        title="Telemetry",
        charts=(
            _layers("Tokens by layer", "moe_router_tokens_total"),
            _job("Routers", "telemetry_routers_(expected|observed)"),
            _job("Overhead (seconds)", "telemetry_overhead_seconds"),
            _job("Skipped reductions, failed exports", "telemetry_(skipped_reductions|export_errors/.+)"),
        ),
    ),
)
"""The charts that a W&B workspace and a TensorBoard layout show, in order."""

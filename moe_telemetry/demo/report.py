"""What the demo says when it ends: tokens, hottest and dead experts, and where to look next."""

from __future__ import annotations

from typing import Any

from moe_telemetry.demo.options import DemoOptions
from moe_telemetry.snapshot import Snapshot
from moe_telemetry.summary import HotExpert, JobSummary, tokens_by_stage

__all__ = ["as_json", "as_text"]

_NUM_HOT = 5


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return the summary as plain values; shares are of all assignments of the expert's own layer."""
    summary = JobSummary.of(snapshot, period="total", stage="train")
    return {
        "run": snapshot.run,
        "steps": snapshot.step,
        "ranks": snapshot.world_size,
        "tokens": tokens_by_stage(snapshot, "total"),
        "layers": {str(layer.router): _layer(layer.stats.max_violation, layer.stats.entropy) for layer in summary.layers},
        "hottest_experts": [_hot(hot) for hot in summary.hottest_experts(_NUM_HOT)],
        "dead_experts": [str(expert) for expert in summary.dead_experts],
        "export_errors": dict(snapshot.health.export_errors),
    }


def as_text(snapshot: Snapshot, options: DemoOptions) -> str:
    """Return the summary for a reader at a terminal."""
    summary = JobSummary.of(snapshot, period="total", stage="train")
    tokens = ", ".join(f"{count:,} in {stage}" for stage, count in tokens_by_stage(snapshot, "total").items())
    hottest = ", ".join(f"{hot.expert} ({hot.share:.1%})" for hot in summary.hottest_experts(_NUM_HOT))
    dead = ", ".join(map(str, summary.dead_experts)) or "none"
    worst = summary.worst_layer
    lines = [
        "",
        f"Run {snapshot.run}: {snapshot.step} steps on {snapshot.world_size} ranks",
        f"  tokens           {tokens}",
        f"  hottest experts  {hottest}    (layer/expert, share of its layer)",
        f"  dead experts     {dead}",
    ]
    if worst is not None:
        lines.append(f"  least balanced   {worst.router}: MaxVio {worst.stats.max_violation:.2f}")
    return "\n".join([*lines, "", "Where to look next", *_next(options)])


def _next(options: DemoOptions) -> list[str]:
    return [
        f"  TensorBoard      tensorboard --logdir {options.logdir}",
        f"  Prometheus       moe-telemetry demo --serve keeps http://127.0.0.1:{options.port}/metrics up to be scraped",
        "  your own model   README.md: three lines around the training loop",
        "  all metrics      moe-telemetry metrics",
    ]


def _layer(max_violation: float, entropy: float) -> dict[str, float]:
    return {"max_violation": round(max_violation, 4), "entropy": round(entropy, 4)}


def _hot(hot: HotExpert) -> dict[str, object]:
    return {"router": str(hot.expert.router), "expert": hot.expert.expert, "share": round(hot.share, 4)}

"""What the demo says when it ends: tokens, hottest and dead experts, and where to look next."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from moe_telemetry.demo.options import DemoOptions
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay_totals import ReplayTotals
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
        "layers": {
            str(layer.router): _layer(layer.stats.max_violation, layer.stats.entropy) for layer in summary.layers
        },
        "hottest_experts": [_hot(hot) for hot in summary.hottest_experts(_NUM_HOT)],
        "dead_experts": [str(expert) for expert in summary.dead_experts],
        "export_errors": dict(snapshot.health.export_errors),
        "replay": {str(key): _replay(totals) for key, totals in _replays(snapshot).items()},
        "misalignment": snapshot.health.misalignment,
    }


def as_text(snapshot: Snapshot, options: DemoOptions) -> str:
    """Return the summary for a reader at a terminal of 80 columns."""
    summary = JobSummary.of(snapshot, period="total", stage="train")
    tokens = ", ".join(f"{count:,} in {stage}" for stage, count in tokens_by_stage(snapshot, "total").items())
    rows = [
        ("tokens", [tokens]),
        ("hottest experts", _hottest_lines(summary)),
        ("dead experts", _dead_lines(summary)),
        ("least balanced", _worst_lines(summary)),
        ("replayed routes", _replay_lines(snapshot)),
        ("failed exports", [f"{name}: {count}" for name, count in snapshot.health.export_errors.items() if count]),
    ]
    head = f"Run {snapshot.run}: {snapshot.step} steps on {snapshot.world_size} ranks"
    return "\n".join(["", head, *_block(rows), "", "Where to look next", *_block(_next_rows(options))])


def _block(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return rows of a title and the lines beside it; without lines, no title."""
    return [f"  {'' if index else title:<17}{line}" for title, lines in rows for index, line in enumerate(lines)]


def _hottest_lines(summary: JobSummary) -> list[str]:
    hottest = summary.hottest_experts(_NUM_HOT)
    if not hottest:
        return []
    even = 1 / next(
        len(layer.counts.assignments) for layer in summary.layers if layer.router == hottest[0].expert.router
    )
    first, *others = [f"{hot.expert!s:<14}{hot.share:>6.1%}" for hot in hottest]
    return [f"{first}  of its layer; an even share is {even:.1%}", *others]


def _dead_lines(summary: JobSummary) -> list[str]:
    dead: dict[str, list[str]] = {}
    for expert in summary.dead_experts:
        dead.setdefault(str(expert.router), []).append(str(expert.expert))
    num_experts = sum(len(layer.counts.assignments) for layer in summary.layers)
    lines = [f"{router}: {', '.join(experts)}" for router, experts in dead.items()]
    return [line for text in lines for line in wrap(text, 60)] or [f"none of {num_experts}"]


def _worst_lines(summary: JobSummary) -> list[str]:
    worst = summary.worst_layer
    if worst is None:
        return []
    excess = worst.stats.max_violation
    return [f"{worst.router}, MaxVio {excess:.2f} (hottest expert: {1 + excess:.1f} x the mean)"]


def _replays(snapshot: Snapshot) -> dict[RouterKey, ReplayTotals]:
    return {
        key: replay
        for key, layer in snapshot.layers.items()
        if (counts := layer.total.get("train")) is not None and (replay := counts.replay) is not None
    }


def _replay_lines(snapshot: Snapshot) -> list[str]:
    lines = [
        f"{key!s:<14}agreement {replay.agreement or 0:.1%}, zero overlap {replay.zero_overlap_ratio or 0:.1%}"
        for key, replay in _replays(snapshot).items()
    ]
    return [*lines, f"cause found: {snapshot.health.misalignment}"] if snapshot.health.misalignment else lines


def _replay(replay: ReplayTotals) -> dict[str, float | None]:
    return {
        "checked": replay.checked,
        "agreement": _rounded(replay.agreement),
        "tie_tolerant_agreement": _rounded(replay.tie_tolerant_agreement),
        "zero_overlap_ratio": _rounded(replay.zero_overlap_ratio),
        "coverage": _rounded(replay.coverage),
    }


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)


def _next_rows(options: DemoOptions) -> list[tuple[str, list[str]]]:
    url = f"http://127.0.0.1:{options.port}/metrics"
    page = f"http://127.0.0.1:{options.port}/"
    return [
        ("live page", [f"{page} while a demo runs, or in a terminal", f"moe-telemetry watch 127.0.0.1:{options.port}"]),
        ("TensorBoard", [f"tensorboard --logdir {options.logdir}"]),
        ("Prometheus", ["moe-telemetry demo --serve", f"keeps {url} up until Ctrl-C"]),
        ("your own model", ["README.md: three lines around the training loop"]),
        ("all metrics", ["moe-telemetry metrics"]),
    ]


def _layer(max_violation: float, entropy: float) -> dict[str, float]:
    return {"max_violation": round(max_violation, 4), "entropy": round(entropy, 4)}


def _hot(hot: HotExpert) -> dict[str, object]:
    return {"router": str(hot.expert.router), "expert": hot.expert.expert, "share": round(hot.share, 4)}

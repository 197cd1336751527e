"""Opening what an analysis is given, and saying what is wrong with what it asks for."""

from __future__ import annotations

import os

from moe_telemetry.analysis.selection import Selection
from moe_telemetry.errors import ConfigError, TraceError
from moe_telemetry.trace.jsonl_source import open_any_trace
from moe_telemetry.trace.reader import Trace

__all__ = ["check_top", "nothing_left", "open_source"]


def open_source(trace: str | os.PathLike[str] | Trace, *, num_experts: int | None = None) -> Trace:
    """Return an open trace.

    Raises:
        TraceError: it cannot be opened, or holds no routes.
    """
    source = trace if isinstance(trace, Trace) else open_any_trace(trace, num_experts=num_experts)
    if not source.counted_parts:
        raise TraceError(f"{source.url} has manifests and no routes yet; wait for the first part, or capture again")
    return source


def check_top(top: int | None, trace: Trace) -> None:
    """Check that every router has so many experts.

    Raises:
        ConfigError: one has fewer.
    """
    smallest = trace.fewest_experts
    if top is not None and not 1 <= top <= smallest:
        raise ConfigError(f"top={top}: expected 1 to {smallest}, the experts of the smallest router")


def nothing_left(trace: Trace, selection: Selection) -> TraceError:
    """Return the error for a selection without a token, which says what there is."""
    stages: set[str] = set()
    first, last = [], []
    for chunk in trace.chunks():
        for batch in trace.batches(chunk, ["step", "stage"]):
            stages.update(batch.column("stage").unique().to_pylist())
            steps = batch.column("step").to_numpy()
            first.append(int(steps.min()))
            last.append(int(steps.max()))
    what = str(selection) or "the whole trace"
    if not stages:
        return TraceError(f"{trace.url} has no router call")
    return TraceError(
        f"{what} leaves no token: {trace.url} has steps {min(first)} to {max(last)} of {', '.join(sorted(stages))}"
    )

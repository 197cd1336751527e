"""The Ray engine: chunks of a trace are counted by Ray tasks, which read them from the trace's own store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from moe_telemetry.analysis.engines import Analysis, count_chunks, in_order
from moe_telemetry.analysis.timeline import Timeline
from moe_telemetry.errors import ConfigError, TraceError
from moe_telemetry.trace.reader import Chunk, Trace

# reports of use and a dashboard are the cluster's business, not a command's
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
except ModuleNotFoundError as error:
    raise ConfigError(f"engine 'ray' needs {error.name}: pip install 'moe-telemetry[ray]'") from error

__all__ = ["count_on_ray"]


def count_on_ray(
    trace: Trace, analysis: Analysis, tasks: Iterable[tuple[Chunk, ...]]
) -> Iterator[tuple[Timeline, int]]:
    """Yield the counts of tasks, with their first steps, in their order.

    Uses the cluster that this process is connected to, else the one that `RAY_ADDRESS` names, else starts one
    on this machine for as long as it takes.
    """
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        count: Any = ray.remote(count_chunks)
        shared = ray.put(trace), ray.put(analysis)
        ahead = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        yield from in_order(tasks, lambda task: count.remote(*shared, task), _result, ahead)
    finally:
        if is_ours:
            ray.shutdown()


def _result(handle: Any) -> Timeline:  # noqa: ANN401  # an ObjectRef
    try:
        timeline: Timeline = ray.get(handle)
    except ray.exceptions.RayTaskError as error:
        # the error of the task itself: Ray's own carries the traceback of another process in its message
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise TraceError(f"Ray could not count a part of the trace: {str(error).splitlines()[0]}") from error
    return timeline

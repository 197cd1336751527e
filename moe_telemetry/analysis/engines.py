"""Running an analysis over a trace: here and now, on a pool of processes, or on Ray; the numbers are the same.

A trace is read in chunks by their first step. Once all chunks that begin below a step have been counted, what lies
below that step is complete and is folded, so that memory is that of the few chunks in flight.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Literal, Protocol, TypeVar

from moe_telemetry.analysis.selection import Selection
from moe_telemetry.analysis.timeline import Group, Timeline, Vector, fold, merge
from moe_telemetry.errors import ConfigError, TraceError
from moe_telemetry.trace.reader import Chunk, Trace

__all__ = ["Analysis", "Engine", "analyse", "count_chunks", "in_order"]

Engine = Literal["local", "ray"]

_MOST_ROWS_PER_TASK, _LEAST_TASKS = 4096, 32
"""Router calls that a process counts in one go; fewer in a small trace, so that all processes get some."""

_Task = tuple[Chunk, ...]
_Handle = TypeVar("_Handle")


class Analysis(Protocol):
    """What is counted in a chunk, and measured from step to step; picklable."""

    @property
    def selection(self) -> Selection:
        """Which tokens it looks at."""

    def count(self, trace: Trace, chunk: Chunk) -> Iterator[Timeline]:
        """Yield the counts of a chunk, batch by batch."""

    def measure(self, group: Group, previous: Vector | None, current: Vector, /) -> tuple[int, ...]:
        """Return what is to be added up of a complete step and the one before."""


def analyse(trace: Trace, analysis: Analysis, *, engine: Engine = "local", workers: int = 1) -> Timeline:
    """Return the counts of all selected chunks of a trace.

    Raises:
        ConfigError: the engine is unknown, or its processes could not reach the trace.
        TraceError: a part cannot be read, or a process that counts was killed.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers}: expected 1 or more")
    selection = analysis.selection
    chunks = [chunk for chunk in trace.chunks() if selection.may_take(chunk.first_step, chunk.last_step)]
    if engine == "ray":
        _check_shared(trace, "engine='ray'")
        from moe_telemetry.analysis.ray_engine import count_on_ray  # noqa: PLC0415  # takes seconds, and an extra

        return _collect(count_on_ray(trace, analysis, _tasks(chunks)), analysis)
    if engine != "local":
        raise ConfigError(f"engine={engine!r}: expected 'local' or 'ray'")
    if workers == 1:
        return _collect(_count_here(trace, analysis, chunks), analysis)
    _check_shared(trace, f"workers={workers}")
    return _collect(_count_in_pool(trace, analysis, _tasks(chunks), workers), analysis)


def count_chunks(trace: Trace, analysis: Analysis, chunks: Sequence[Chunk]) -> Timeline:
    """Return the counts of some chunks, all of their steps open."""
    timeline = Timeline()
    for chunk in chunks:
        for counted in analysis.count(trace, chunk):
            timeline = merge(timeline, counted)
    return timeline


def in_order(
    tasks: Iterable[_Task], submit: Callable[[_Task], _Handle], result: Callable[[_Handle], Timeline], ahead: int
) -> Iterator[tuple[Timeline, int]]:
    """Yield the counts of each task, and its first step, in their order; at most `ahead` tasks are under way."""
    waiting: deque[tuple[_Handle, int]] = deque()
    for task in tasks:
        waiting.append((submit(task), task[0].first_step))
        if len(waiting) >= ahead:
            handle, first_step = waiting.popleft()
            yield result(handle), first_step
    while waiting:
        handle, first_step = waiting.popleft()
        yield result(handle), first_step


def _collect(counted: Iterable[tuple[Timeline, int]], analysis: Analysis) -> Timeline:
    timeline = Timeline()
    for counts, first_step in counted:
        # chunks come by their first step: none that is still to come begins below this one
        if first_step > timeline.folded_before:
            timeline = fold(timeline, analysis.measure, first_step)
        timeline = merge(timeline, counts)
    return timeline


def _count_here(trace: Trace, analysis: Analysis, chunks: Iterable[Chunk]) -> Iterator[tuple[Timeline, int]]:
    for chunk in chunks:
        for counts in analysis.count(trace, chunk):
            yield counts, chunk.first_step


def _count_in_pool(
    trace: Trace, analysis: Analysis, tasks: Iterable[_Task], workers: int
) -> Iterator[tuple[Timeline, int]]:
    # a forked child would inherit the locks of Arrow's and fsspec's threads
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:

        def submit(task: _Task) -> Future[Timeline]:
            return pool.submit(count_chunks, trace, analysis, task)

        try:
            yield from in_order(tasks, submit, Future.result, 2 * workers)
        except BrokenProcessPool as error:
            raise TraceError(
                f"a process that counted {trace.url} was killed, for want of memory perhaps: take fewer workers"
            ) from error


def _tasks(chunks: Sequence[Chunk]) -> Iterator[_Task]:
    enough = min(_MOST_ROWS_PER_TASK, sum(chunk.num_rows for chunk in chunks) // _LEAST_TASKS)
    task: list[Chunk] = []
    for chunk in chunks:
        task.append(chunk)
        if sum(each.num_rows for each in task) > enough:
            yield tuple(task)
            task = []
    if task:
        yield tuple(task)


def _check_shared(trace: Trace, setting: str) -> None:
    if trace.url.startswith("memory:"):
        raise ConfigError(f"{setting} with {trace.url}: other processes do not see this one's memory; use one process")

"""Timeline: what an analysis knows after part of a trace, in whole numbers that can be added up in any order.

    timeline = merge(merge(partial(a), partial(b)), partial(c))     # any order, any grouping
    results = finish(timeline, measure)

Every group (a router in a stage) has a vector of counts for every step. A measure makes whole numbers of a step's
vector and the one before, such as how many hot experts stayed hot. It needs whole steps, so it is taken when a
step is complete: `fold` does so for all steps below one that can grow no more, and forgets their vectors. Memory
is then that of the steps that are still open, however long the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_telemetry.analysis.selection import FIRST_STEP
from moe_telemetry.identity import RouterKey

__all__ = ["Folded", "Group", "Measure", "Timeline", "Vector", "finish", "fold", "merge"]

Vector = NDArray[np.int64]

Measure = Callable[["Group", "Vector | None", "Vector"], tuple[int, ...]]
"""Makes whole numbers, always as many, of a step's vector and that of the step before, None at the first."""


class Group(NamedTuple):
    """What is analysed by itself: a router or a pair of routers in one stage."""

    stage: str
    router: RouterKey


class Folded(NamedTuple):
    """Complete steps of a group, without their vectors."""

    total: Vector
    """Sum over steps."""
    last: Vector
    num_steps: int
    measures: tuple[int, ...]
    """Sums over steps of what the measure makes."""


@dataclass(frozen=True)
class Timeline:
    """Counts of open steps, and what is left of complete ones."""

    steps: Mapping[Group, Mapping[int, Vector]] = field(default_factory=dict)
    folded: Mapping[Group, Folded] = field(default_factory=dict)
    folded_before: int = FIRST_STEP
    """Steps below it are complete; they may not come again."""


def merge(one: Timeline, other: Timeline) -> Timeline:
    """Return the sum of two timelines, at most one of which has complete steps; associative and commutative."""
    if other.folded:
        one, other = other, one
    assert not other.folded  # noqa: S101  # a part of a trace is counted before any of its steps is complete
    steps = {group: dict(vectors) for group, vectors in one.steps.items()}
    for group, vectors in other.steps.items():
        mine = steps.setdefault(group, {})
        for step, vector in vectors.items():
            assert step >= one.folded_before  # noqa: S101  # the plan knows which steps can still come
            mine[step] = mine[step] + vector if step in mine else vector
    return Timeline(steps, one.folded, one.folded_before)


def fold(timeline: Timeline, measure: Measure, before: int) -> Timeline:
    """Return the same with all steps below `before` complete."""
    folded = dict(timeline.folded)
    still_open: dict[Group, dict[int, Vector]] = {}
    for group, vectors in timeline.steps.items():
        for step, vector in sorted(vectors.items(), key=_step_of):
            if step < before:
                folded[group] = _append(group, folded.get(group), vector, measure)
            else:
                still_open.setdefault(group, {})[step] = vector
    return Timeline(still_open, folded, before)


def finish(timeline: Timeline, measure: Measure) -> Iterator[tuple[Group, Folded]]:
    """Yield the sums of every group, in the order of stages and of the model."""
    folded = fold(timeline, measure, 2**63).folded
    yield from sorted(folded.items(), key=lambda item: (item[0].stage, item[0].router.order))


def _append(group: Group, head: Folded | None, vector: Vector, measure: Measure) -> Folded:
    if head is None:
        return Folded(vector, vector, 1, measure(group, None, vector))
    measured = measure(group, head.last, vector)
    sums = tuple(a + b for a, b in zip(head.measures, measured, strict=True))
    return Folded(head.total + vector, vector, head.num_steps + 1, sums)


def _step_of(item: tuple[int, Any]) -> int:
    return item[0]

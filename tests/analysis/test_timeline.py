"""Timelines: any split, any order, folded early or late, the numbers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_telemetry import RouterKey
from moe_telemetry.analysis.calls import Calls
from moe_telemetry.analysis.concentration import ConcentrationCount
from moe_telemetry.analysis.counting import count_experts
from moe_telemetry.analysis.selection import Selection
from moe_telemetry.analysis.timeline import Timeline, finish, fold, merge
from moe_telemetry.trace.format import schema_for
from tests.analysis.trace_files import call

KEYS = (RouterKey("decoder", 1), RouterKey("decoder", 10), RouterKey("mtp0", 1))
ANALYSIS = ConcentrationCount(Selection(), 2)


def _calls() -> list[dict[str, Any]]:
    chance = np.random.default_rng(0)
    return [
        dict(
            call(
                chance.integers(-1, 9, size=(3, 2)),
                key,
                step=step,
                microbatch=microbatch,
                stage=("train", "eval")[microbatch],
                valid=None if step % 2 else [True, False, True],
            )
        )
        for step in (3, 4, 7, 12, 100)
        for microbatch in range(2)
        for key in KEYS
    ]


CALLS = _calls()


def _count(calls: Sequence[dict[str, Any]]) -> Timeline:
    batch = pa.RecordBatch.from_pylist(list(calls), schema=schema_for(8))
    return count_experts(Calls.of(batch, Selection(), lambda _: 8))


def _figures(timeline: Timeline) -> list[tuple[object, ...]]:
    return [
        (group, folded.total.tolist(), folded.num_steps, folded.measures)
        for group, folded in finish(timeline, ANALYSIS.measure)
    ]


EXPECTED = _figures(_count(CALLS))


@st.composite
def splits(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Deal the calls out to several hands, some of which may stay empty."""
    hands = draw(st.lists(st.integers(0, 4), min_size=len(CALLS), max_size=len(CALLS)))
    parts: list[list[dict[str, Any]]] = [[] for _ in range(5)]
    for hand, each in zip(hands, draw(st.permutations(CALLS)), strict=True):
        parts[hand].append(each)
    return parts


@given(splits(), st.data())
def test_any_split_merged_in_any_order_gives_the_same_figures(
    parts: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    timelines = [_count(part) for part in parts]
    while len(timelines) > 1:
        one = timelines.pop(data.draw(st.integers(0, len(timelines) - 1)))
        other = timelines.pop(data.draw(st.integers(0, len(timelines) - 1)))
        timelines.append(merge(one, other))
    assert _figures(timelines[0]) == EXPECTED


@given(st.lists(st.integers(0, 101), max_size=6))
def test_folding_early_changes_nothing_and_forgets_vectors(marks: list[int]) -> None:
    timeline = Timeline()
    for before in [*sorted(marks), 1000]:
        coming = [each for each in CALLS if timeline.folded_before <= each["step"] < before]
        timeline = merge(_count(coming), timeline)
        timeline = fold(timeline, ANALYSIS.measure, before)
        assert timeline.steps == {}
    assert _figures(timeline) == EXPECTED


def test_merging_changes_neither_side() -> None:
    one, other = _count(CALLS[:20]), _count(CALLS[20:])
    before = [_figures(each) for each in (one, other)]
    reduce(merge, [one, other, one])
    assert [_figures(each) for each in (one, other)] == before


def test_two_timelines_with_complete_steps_do_not_merge() -> None:
    folded = fold(_count(CALLS), ANALYSIS.measure, 1000)
    with pytest.raises(AssertionError):
        merge(folded, folded)

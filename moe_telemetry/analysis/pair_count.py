"""PairCount: what is counted of a chunk to compare predicted with actual choices.

Letters: T tokens of a call, K experts chosen per token (top-k), E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from moe_telemetry.analysis.calls import COLUMNS, Calls
from moe_telemetry.analysis.measures import default_top
from moe_telemetry.analysis.pair import Likeness, PairPredictability
from moe_telemetry.analysis.predicting import Prediction, predict
from moe_telemetry.analysis.selection import Selection
from moe_telemetry.analysis.tensors import StoredTensor, TensorIndex
from moe_telemetry.analysis.timeline import Folded, Group, Timeline, Vector
from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.format import tensor_name
from moe_telemetry.trace.reader import Chunk, Part, Trace

__all__ = ["PairCount", "as_pair"]


class _Tail(IntEnum):
    """What stands after the E actual and the E predicted assignments of a vector, counted from its end."""

    TOKENS = -1
    NOT_FINITE = -2
    HITS = -3
    CHOICES = -4
    CHANCE_HITS = -5
    CALLS = -6
    WITHOUT_TENSORS = -7


class _Tensors(NamedTuple):
    hidden_TH: StoredTensor
    weight_EH: StoredTensor
    bias_E: StoredTensor | None


@dataclass(frozen=True)
class PairCount:
    """What is counted for `predictability`; an `Analysis`."""

    selection: Selection
    top: int | None
    previous_of: Mapping[RouterKey, RouterKey]
    steps_of_parts: Mapping[Part, tuple[int, int]]

    def count(self, trace: Trace, chunk: Chunk) -> Iterator[Timeline]:
        """Yield `[2 E + 7]` counts of every router that has one before it, by group and step."""
        index = TensorIndex(trace, self.steps_of_parts)
        for batch in trace.batches(chunk, COLUMNS):
            calls = Calls.of(batch, self.selection, trace.experts_of)
            found: dict[Group, dict[int, Vector]] = {}
            for call, group in enumerate(calls.groups[each] for each in calls.group_C):
                if group.router in self.previous_of and calls.rows_C[call]:
                    steps, step = found.setdefault(group, {}), int(calls.steps_C[call])
                    vector = self._count_call(trace, index, chunk.part, calls, call)
                    steps[step] = steps[step] + vector if step in steps else vector
            yield Timeline(found)

    def measure(self, _group: Group, previous: Vector | None, current: Vector, /) -> tuple[int, ...]:
        """Return how alike predicted and actual load are, and the load of the step before and the actual one."""
        actual, predicted = _loads(current)
        before = Likeness() if previous is None else Likeness.of(_loads(previous)[0], actual, self.top)
        return *Likeness.of(predicted, actual, self.top), *before

    def _count_call(self, trace: Trace, index: TensorIndex, part: Part, calls: Calls, call: int) -> Vector:
        key = calls.groups[calls.group_C[call]].router
        router = next(router for router in trace.routers if router.key == key)
        step, microbatch = int(calls.steps_C[call]), int(calls.microbatches_C[call])
        tensors = self._find(index, part, key, step, microbatch)
        ids_TK = calls.ids_of(call)
        if tensors is None or tensors.hidden_TH.shape[:1] != (len(ids_TK),):
            # nothing of the call may count: predicted and actual loads are of the same tokens
            vector = np.zeros(2 * router.num_experts + len(_Tail), dtype=np.int64)
            vector[_Tail.WITHOUT_TENSORS] = 1
            return vector
        return _as_vector(predict(router, *tensors, ids_TK, calls.counted_of(call)), ids_TK.shape[1])

    def _find(self, index: TensorIndex, part: Part, key: RouterKey, step: int, microbatch: int) -> _Tensors | None:
        hidden = index.find(tensor_name("hidden_states", step, microbatch, self.previous_of[key]), step, part)
        if hidden is None:
            return None
        weight = index.find_anywhere(tensor_name("router_weights", step, 0, key), step, part)
        if weight is None:
            return None
        return _Tensors(hidden, weight, index.find_beside(tensor_name("expert_bias", step, 0, key), weight))


def as_pair(group: Group, folded: Folded, previous: RouterKey, top: int | None) -> PairPredictability:
    """Return what the sums over steps say."""
    actual, predicted = _loads(folded.total)
    total = folded.total.tolist()
    size = len(Likeness._fields)
    return PairPredictability(
        stage=group.stage,
        router=group.router,
        previous=previous,
        num_experts=len(actual),
        top=top or default_top(len(actual)),
        num_steps=folded.num_steps,
        num_calls=total[_Tail.CALLS],
        calls_without_tensors=total[_Tail.WITHOUT_TENSORS],
        tokens=total[_Tail.TOKENS],
        tokens_not_finite=total[_Tail.NOT_FINITE],
        hits=total[_Tail.HITS],
        choices=total[_Tail.CHOICES],
        chance_hits=total[_Tail.CHANCE_HITS],
        actual=tuple(actual.tolist()),
        predicted=tuple(predicted.tolist()),
        prediction=Likeness(*folded.measures[:size]),
        last_step=Likeness(*folded.measures[size:]),
    )


def _loads(vector: Vector) -> tuple[Vector, Vector]:
    """Return the actual and the predicted load of a vector."""
    num_experts = (len(vector) - len(_Tail)) // 2
    return vector[:num_experts], vector[num_experts : 2 * num_experts]


def _as_vector(prediction: Prediction, top_k: int) -> Vector:
    tail = np.zeros(len(_Tail), dtype=np.int64)
    tail[_Tail.TOKENS] = prediction.tokens
    tail[_Tail.NOT_FINITE] = prediction.not_finite
    tail[_Tail.HITS] = prediction.hits
    tail[_Tail.CHOICES] = prediction.choices
    tail[_Tail.CHANCE_HITS] = top_k * prediction.choices
    tail[_Tail.CALLS] = 1
    return np.concatenate((prediction.actual_E, prediction.predicted_E, tail))

"""Calls: the router calls of a record batch as flat arrays, checked, and which of their tokens count.

Letters: C calls, N tokens of all calls, M expert ids of all calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from moe_telemetry.analysis.selection import Selection
from moe_telemetry.analysis.timeline import Group
from moe_telemetry.errors import TraceError
from moe_telemetry.identity import RouterKey

__all__ = ["COLUMNS", "Calls"]

COLUMNS = (
    "step",
    "microbatch",
    "stage",
    "block",
    "layer",
    "rank",
    "num_tokens",
    "top_k",
    "expert_ids",
    "valid",
    "sequence_starts",
)

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of a batch that a selection takes."""

    steps_C: IntArray
    microbatches_C: IntArray
    ranks_C: IntArray
    groups: tuple[Group, ...]
    """The groups that occur."""
    num_experts: tuple[int, ...]
    """E of each group."""
    group_C: IntArray
    """Which of them a call belongs to."""
    top_k_C: IntArray
    num_tokens_C: IntArray
    """Of the whole call, which may be more than its rows."""
    rows_C: IntArray
    ids_M: NDArray[np.signedinteger[Any]]
    valid_N: NDArray[np.bool_] | None
    """True for real tokens; None where all are."""
    taken_N: NDArray[np.bool_] | None
    """True for tokens that the selection takes, real or not; None where it takes all of these calls."""

    def __len__(self) -> int:
        """Return how many calls there are."""
        return len(self.steps_C)

    @classmethod
    def of(cls, batch: pa.RecordBatch, selection: Selection, experts_of: Callable[[RouterKey], int]) -> Calls:
        """Return the calls of a batch of a trace, with all of `COLUMNS`.

        Raises:
            TraceError: a row is of a router that the manifest does not name, or begins a sequence before itself.
        """
        batch = _selected(batch, selection)
        groups, group_C = _groups(batch)
        num_experts = tuple(experts_of(group.router) for group in groups)
        top_k_C = _numbers(batch, "top_k")
        ids = batch.column("expert_ids")
        num_ids_C = pc.list_value_length(ids).to_numpy(zero_copy_only=False).astype(np.int64)
        rows_C = num_ids_C // top_k_C
        return cls(
            steps_C=_numbers(batch, "step"),
            microbatches_C=_numbers(batch, "microbatch"),
            ranks_C=_numbers(batch, "rank"),
            groups=groups,
            num_experts=num_experts,
            group_C=group_C,
            top_k_C=top_k_C,
            num_tokens_C=_numbers(batch, "num_tokens"),
            rows_C=rows_C,
            ids_M=ids.flatten().to_numpy(zero_copy_only=False),
            valid_N=_valid(batch, rows_C),
            taken_N=_decode_tokens(batch, rows_C) if selection.decode else None,
        )

    def ids_of(self, call: int) -> NDArray[np.signedinteger[Any]]:
        """Return the expert ids `[T, K]` of one call."""
        stop = self._stop_of_ids_C[call]
        return self.ids_M[stop - self.rows_C[call] * self.top_k_C[call] : stop].reshape(self.rows_C[call], -1)

    def counted_of(self, call: int) -> NDArray[np.bool_]:
        """Return which tokens `[T]` of one call are real and taken."""
        counted_N = self.counted_N()
        stop = self._stop_C[call]
        rows = self.rows_C[call]
        return np.ones(rows, dtype=np.bool_) if counted_N is None else counted_N[stop - rows : stop]

    @cached_property
    def _stop_C(self) -> IntArray:
        return np.cumsum(self.rows_C)

    @cached_property
    def _stop_of_ids_C(self) -> IntArray:
        return np.cumsum(self.rows_C * self.top_k_C)

    def call_N(self) -> IntArray:
        """Return the call that each token belongs to."""
        return np.repeat(np.arange(len(self)), self.rows_C)

    def counted_N(self) -> NDArray[np.bool_] | None:
        """Return which tokens are real and taken; None where all are."""
        masks = [mask for mask in (self.valid_N, self.taken_N) if mask is not None]
        return np.logical_and.reduce(masks) if masks else None

    def each_id_of(self, values_N: NDArray[Any]) -> NDArray[Any]:
        """Repeat a value a token for each of its expert ids."""
        few = np.unique(self.top_k_C)
        return np.repeat(values_N, int(few[0]) if len(few) == 1 else np.repeat(self.top_k_C, self.rows_C))


def _selected(batch: pa.RecordBatch, selection: Selection) -> pa.RecordBatch:
    steps = _numbers(batch, "step")
    taken = (steps >= selection.start) & (steps < selection.stop)
    if selection.stage is not None:
        taken &= pc.equal(batch.column("stage"), selection.stage).to_numpy(zero_copy_only=False)
    return batch if taken.all() else batch.filter(pa.array(taken))


def _groups(batch: pa.RecordBatch) -> tuple[tuple[Group, ...], IntArray]:
    stages, blocks = (pc.dictionary_encode(batch.column(name)) for name in ("stage", "block"))
    layers, layer_C = np.unique(_numbers(batch, "layer"), return_inverse=True)
    shape = max(1, len(stages.dictionary)), max(1, len(blocks.dictionary)), max(1, len(layers))
    code_C = np.ravel_multi_index((stages.indices.to_numpy(), blocks.indices.to_numpy(), layer_C), shape)
    codes, group_C = np.unique(code_C, return_inverse=True)
    names = stages.dictionary.to_pylist(), blocks.dictionary.to_pylist()
    groups = tuple(
        Group(names[0][stage], RouterKey(names[1][block], int(layers[layer])))
        for stage, block, layer in zip(*np.unravel_index(codes, shape), strict=True)
    )
    return groups, group_C.astype(np.int64)


def _numbers(batch: pa.RecordBatch, name: str) -> IntArray:
    numbers: IntArray = batch.column(name).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _valid(batch: pa.RecordBatch, rows_C: IntArray) -> NDArray[np.bool_] | None:
    valid = batch.column("valid")
    if valid.null_count == len(valid):
        return None
    given_C = valid.is_valid().to_numpy(zero_copy_only=False)
    valid_N = np.ones(rows_C.sum(), dtype=np.bool_)
    valid_N[np.repeat(given_C, rows_C)] = valid.flatten().to_numpy(zero_copy_only=False)
    return valid_N


def _decode_tokens(batch: pa.RecordBatch, rows_C: IntArray) -> NDArray[np.bool_]:
    """Return which tokens are a sequence of their own in their call."""
    lists = batch.column("sequence_starts")
    num_starts_C = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    call = np.repeat(np.arange(len(batch)), num_starts_C)
    if (starts < 0).any():
        raise TraceError("a row of the trace has a sequence that begins before its first token; capture it again")
    is_last = np.append(call[1:] != call[:-1], True) if len(call) else np.zeros(0, dtype=np.bool_)
    # the last sequence ends with the call, which may have more tokens than rows were kept
    ends = np.where(is_last, _numbers(batch, "num_tokens")[call], np.roll(starts, -1))
    single = (ends - starts == 1) & (starts < rows_C[call])
    taken_N = np.zeros(rows_C.sum(), dtype=np.bool_)
    first_C = np.cumsum(rows_C) - rows_C
    taken_N[(first_C[call] + starts)[single]] = True
    return taken_N

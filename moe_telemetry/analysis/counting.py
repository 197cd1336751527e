"""Counting the experts of router calls: one vector of whole numbers a group and step.

Letters: C calls, N tokens and M expert ids of all calls, E experts, U pairs of a group and a step.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from moe_telemetry.analysis.calls import Calls
from moe_telemetry.analysis.timeline import Group, Timeline, Vector

__all__ = ["Tail", "count_experts"]


class Tail(IntEnum):
    """What stands after the E assignments of a vector, counted from its end."""

    TOKENS = -1
    """Real tokens that the selection takes."""
    PADDING_TOKENS = -2
    UNMADE = -3
    """Choices that were not made: -1."""
    INVALID = -4
    """Ids of E or more, which no router of E experts can choose."""
    CALLS = -5
    TOKENS_NOT_KEPT = -6
    """Tokens of these calls beyond the limit of the capture."""


def count_experts(calls: Calls) -> Timeline:
    """Return `[E + 6]` counts of every group and step of some calls: assignments, then what `Tail` names."""
    steps, step_C = np.unique(calls.steps_C, return_inverse=True)
    pairs, pair_C = np.unique(calls.group_C * len(steps) + step_C, return_inverse=True)
    most = max(calls.num_experts, default=0)
    counts_U = _count_ids(calls, pair_C, len(pairs), most)
    tails_U = _tails(calls, pair_C, len(pairs))
    found: dict[Group, dict[int, Vector]] = {}
    for pair, counts, tail in zip(pairs, counts_U, tails_U, strict=True):
        group, size = calls.groups[pair // len(steps)], calls.num_experts[pair // len(steps)]
        tail[Tail.UNMADE] = counts[0]
        tail[Tail.INVALID] = counts[size + 1 :].sum()
        found.setdefault(group, {})[int(steps[pair % len(steps)])] = np.concatenate((counts[1 : size + 1], tail))
    return Timeline(found)


def _count_ids(calls: Calls, pair_C: NDArray[np.int64], num_pairs: int, num_experts: int) -> Vector:
    """Return `[U, E + 2]`: unmade choices, choices of each expert, ids beyond E."""
    width = num_experts + 2
    # a shift that makes room for what is out of range, at either end
    codes_M = np.clip(calls.ids_M, -1, num_experts).astype(np.int64)
    codes_M += np.repeat(pair_C * width + 1, calls.rows_C * calls.top_k_C)
    counted_N = calls.counted_N()
    if counted_N is not None:
        codes_M = codes_M[calls.each_id_of(counted_N)]
    return np.bincount(codes_M, minlength=num_pairs * width).reshape(num_pairs, width)


def _tails(calls: Calls, pair_C: NDArray[np.int64], num_pairs: int) -> Vector:
    tails_U = np.zeros((num_pairs, len(Tail)), dtype=np.int64)
    np.add.at(tails_U[:, Tail.CALLS], pair_C, 1)
    np.add.at(tails_U[:, Tail.TOKENS_NOT_KEPT], pair_C, calls.num_tokens_C - calls.rows_C)
    counted_N = calls.counted_N()
    if counted_N is None:
        np.add.at(tails_U[:, Tail.TOKENS], pair_C, calls.rows_C)
        return tails_U
    pair_N = pair_C[calls.call_N()]
    tails_U[:, Tail.TOKENS] = np.bincount(pair_N[counted_N], minlength=num_pairs)
    if calls.valid_N is not None:
        padding_N = ~calls.valid_N if calls.taken_N is None else calls.taken_N & ~calls.valid_N
        tails_U[:, Tail.PADDING_TOKENS] = np.bincount(pair_N[padding_N], minlength=num_pairs)
    return tails_U

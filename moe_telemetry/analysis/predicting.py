"""What a router would choose for the hidden states of the router before it.

Letters: T tokens, K experts chosen per token (top-k), E experts, H width of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_telemetry.analysis.tensors import StoredTensor
from moe_telemetry.analysis.timeline import Vector
from moe_telemetry.errors import TraceError
from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.manifest import TracedRouter

__all__ = ["Prediction", "predecessors", "predict", "top_k_map"]

_ROWS_AT_A_TIME = 1024
"""Rows that are multiplied at once, always as many, so that a product has the same bits wherever it is made."""

Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Prediction(NamedTuple):
    """Counts of one router call."""

    actual_E: Vector
    predicted_E: Vector
    hits: int
    """Choices that were predicted."""
    choices: int
    tokens: int
    not_finite: int
    """Real tokens without a prediction: a hidden state is NaN or infinite."""


def predecessors(routers: Sequence[TracedRouter]) -> dict[RouterKey, RouterKey]:
    """Return the router before each, in the same block: a decoder's is never that of an MTP block."""
    ordered = sorted((router.key for router in routers), key=lambda key: key.order)
    return {key: before for before, key in pairwise(ordered) if before.block == key.block}


def predict(
    router: TracedRouter,
    hidden_TH: StoredTensor,
    weight_EH: StoredTensor,
    bias_E: StoredTensor | None,
    ids_TK: NDArray[np.signedinteger],
    counted_T: Bools,
) -> Prediction:
    """Return predicted and actual choices of the tokens that count.

    The product is made in float64: whichever way it is cut up, a tie or a choice comes out the same.

    Raises:
        TraceError: shapes do not fit each other.
    """
    if hidden_TH.shape[1:] != weight_EH.shape[1:] or weight_EH.shape[0] != router.num_experts:
        raise TraceError(
            f"the weights of {router.key} are {list(weight_EH.shape)}, the hidden states before it "
            f"{list(hidden_TH.shape)}; expected [{router.num_experts}, H] and [T, H]"
        )
    weight = weight_EH.rows().astype(np.float64).T
    bias = None if bias_E is None or not router.is_biased else bias_E.rows().astype(np.float64)
    actual_E, predicted_E = np.zeros((2, router.num_experts), dtype=np.int64)
    sums = Prediction(actual_E, predicted_E, 0, 0, 0, 0)
    for first in range(0, len(ids_TK), _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        if counted_T[rows].any():
            hidden = hidden_TH.rows(first, min(len(ids_TK), rows.stop))[counted_T[rows]].astype(np.float64)
            with np.errstate(all="ignore"):  # what is not finite is counted
                logits = hidden @ weight
                choice = logits if bias is None else _SCORES[router.score_function](logits) + bias
            sums = _add(sums, _count(choice, ids_TK[rows][counted_T[rows]]))
    return sums


def top_k_map(choice_TE: Doubles, top_k: int) -> Bools:
    """Return which experts have the `top_k` largest values of a row, the lower id first among equals."""
    num_experts = choice_TE.shape[1]
    if top_k >= num_experts:
        return np.ones(choice_TE.shape, dtype=np.bool_)
    least = np.partition(choice_TE, num_experts - top_k, axis=1)[:, num_experts - top_k, None]
    chosen = choice_TE >= least
    tied = np.flatnonzero(chosen.sum(1) > top_k)
    if len(tied):
        above = choice_TE[tied] > least[tied]
        equal = chosen[tied] & ~above
        room = top_k - above.sum(1, keepdims=True)
        chosen[tied] = above | (equal & (equal.cumsum(1) <= room))
    return chosen


def _count(choice_TE: Doubles, ids_TK: NDArray[np.signedinteger]) -> Prediction:
    num_experts = choice_TE.shape[1]
    finite = np.isfinite(choice_TE).all(1)
    predicted_TE = top_k_map(choice_TE[finite], ids_TK.shape[1])
    made = (ids_TK[finite] >= 0) & (ids_TK[finite] < num_experts)
    row, ids = np.nonzero(made)[0], ids_TK[finite][made].astype(np.int64)
    return Prediction(
        actual_E=np.bincount(ids, minlength=num_experts),
        predicted_E=predicted_TE.sum(0),
        hits=int(predicted_TE[row, ids].sum()),
        choices=len(ids),
        tokens=int(finite.sum()),
        not_finite=int((~finite).sum()),
    )


def _add(one: Prediction, other: Prediction) -> Prediction:
    return Prediction(
        one.actual_E + other.actual_E,
        one.predicted_E + other.predicted_E,
        *(a + b for a, b in zip(one[2:], other[2:], strict=True)),
    )


def _softmax(logits_TE: Doubles) -> Doubles:
    powers = np.exp(logits_TE - logits_TE.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def _sigmoid(logits_TE: Doubles) -> Doubles:
    return np.asarray(1 / (1 + np.exp(-logits_TE)))


def _sqrtsoftplus(logits_TE: Doubles) -> Doubles:
    return np.asarray(np.sqrt(np.logaddexp(0, logits_TE)))


_SCORES: dict[str, Callable[[Doubles], Doubles]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}

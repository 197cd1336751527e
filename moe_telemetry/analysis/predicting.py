"""What a router would choose for the hidden states of the router before it.

Letters: T tokens, K experts chosen per token (top-k), E experts, H width of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_telemetry.analysis.tensors import StoredTensor
from moe_telemetry.analysis.timeline import Vector
from moe_telemetry.errors import TraceError
from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.manifest import TracedRouter

__all__ = ["Prediction", "predecessors", "predict", "top_k_map"]

_ROWS_AT_A_TIME = 1024
"""Rows that are read and multiplied at once."""
_EPS = 2.0**-24
_SAFETY = 8.0

Floats = NDArray[np.floating[Any]]
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

    Raises:
        TraceError: shapes do not fit each other.
    """
    _check_shapes(router, hidden_TH, weight_EH, bias_E)
    gate = _Gate.of(router, weight_EH, bias_E)
    actual_E, predicted_E = np.zeros((2, router.num_experts), dtype=np.int64)
    sums = Prediction(actual_E, predicted_E, 0, 0, 0, 0)
    for first in range(0, len(ids_TK), _ROWS_AT_A_TIME):
        stop = min(len(ids_TK), first + _ROWS_AT_A_TIME)
        counted, ids = counted_T[first:stop], ids_TK[first:stop]
        if counted.any():
            hidden = hidden_TH.rows(first, stop)
            # most calls have no padding: nothing is copied then
            hidden, ids = (hidden, ids) if counted.all() else (hidden[counted], ids[counted])
            sums = _add(sums, _count(gate, hidden, ids))
    return sums


def _check_shapes(
    router: TracedRouter, hidden_TH: StoredTensor, weight_EH: StoredTensor, bias_E: StoredTensor | None
) -> None:
    if weight_EH.shape != (router.num_experts, *hidden_TH.shape[1:2]) or len(hidden_TH.shape) != 2:
        raise TraceError(
            f"the weights of {router.key} are {list(weight_EH.shape)}, the hidden states before it "
            f"{list(hidden_TH.shape)}; expected [{router.num_experts}, H] and [T, H]"
        )
    if bias_E is not None and bias_E.shape != (router.num_experts,):
        raise TraceError(f"the bias of {router.key} is {list(bias_E.shape)}; expected [{router.num_experts}]")


def top_k_map(choice_TE: Floats, top_k: int) -> Bools:
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


class _Gate(NamedTuple):
    """A router's weights, and how it makes choices of them."""

    weight_HE: Floats
    bias_E: Floats | None
    score: Callable[[Floats], Floats]

    @classmethod
    def of(cls, router: TracedRouter, weight_EH: StoredTensor, bias_E: StoredTensor | None) -> _Gate:
        if bias_E is None or not router.is_biased:
            return cls(weight_EH.rows().T, None, _softmax)  # no score function changes an order
        if router.score_function not in _SCORES:
            known = ", ".join(_SCORES)
            raise TraceError(f"{router.key} has scores by {router.score_function!r}; this version knows {known}")
        return cls(weight_EH.rows().T, bias_E.rows().astype(np.float64), _SCORES[router.score_function])

    def values(self, hidden_TH: Floats, dtype: type[np.floating[Any]]) -> Floats:
        """Return what the router chooses the largest of, `[T, E]`, computed in a dtype."""
        with np.errstate(all="ignore"):  # what is not finite is dealt with by the caller
            logits = hidden_TH.astype(dtype, copy=False) @ self.weight_HE.astype(dtype, copy=False)
            return logits if self.bias_E is None else self.score(logits) + self.bias_E.astype(dtype)

    def chosen(self, hidden_TH: Floats, top_k: int) -> tuple[Bools, Bools]:
        """Return the chosen experts `[T, E]`, and which rows are finite `[T]`.

        Float32 decides where it cannot be wrong, and float64 the other rows: so the choice is the same on
        every machine, with any number of threads, at half the cost of float64 alone.
        """
        values_TE = self.values(hidden_TH, np.float32)
        least_T1, margin_T = _edge(values_TE, top_k)
        chosen = values_TE >= least_T1
        close = ~(margin_T > self._doubt(hidden_TH))  # NaN is close, too
        finite = np.ones(len(values_TE), dtype=np.bool_)
        if close.any():
            exact = self.values(hidden_TH[close], np.float64)
            finite[close] = np.isfinite(exact).all(1)
            chosen[close] = top_k_map(exact, top_k)
        return chosen, finite

    def _doubt(self, hidden_TH: Floats) -> Floats:
        """Return how far apart two values of a row have to be for float32 to order them, `[T]`."""
        with np.errstate(all="ignore"):
            hidden, weight = (each.astype(np.float32, copy=False) for each in (hidden_TH, self.weight_HE))
            lengths = np.sqrt(np.einsum("th,th->t", hidden, hidden))
            longest = np.sqrt(np.einsum("he,he->e", weight, weight)).max()
            # errors of a sum of H products grow with the root of H; no score function is steeper than 1
            return np.asarray(_EPS * (_SAFETY * np.sqrt(hidden_TH.shape[1]) * lengths * longest + _SAFETY))


def _edge(values_TE: Floats, top_k: int) -> tuple[Floats, Floats]:
    """Return the least chosen value `[T, 1]`, and by how much it leads `[T]`: NaN where a value is not finite."""
    num_experts = values_TE.shape[1]
    finite = np.isfinite(values_TE).all(1)
    if top_k >= num_experts:
        return values_TE.min(1, keepdims=True), np.where(finite, np.inf, np.nan)
    ordered = np.partition(values_TE, (num_experts - top_k - 1, num_experts - top_k), axis=1)
    least = ordered[:, num_experts - top_k]
    with np.errstate(invalid="ignore"):
        return least[:, None], np.where(finite, least - ordered[:, num_experts - top_k - 1], np.nan)


def _count(gate: _Gate, hidden_TH: Floats, ids_TK: NDArray[np.signedinteger]) -> Prediction:
    num_experts = gate.weight_HE.shape[1]
    chosen_TE, finite = gate.chosen(hidden_TH, ids_TK.shape[1])
    predicted_TE = chosen_TE[finite]
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


def _softmax(logits_TE: Floats) -> Floats:
    powers = np.exp(logits_TE - logits_TE.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def _sigmoid(logits_TE: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-logits_TE)))


def _sqrtsoftplus(logits_TE: Floats) -> Floats:
    return np.asarray(np.sqrt(np.logaddexp(0, logits_TE)))


_SCORES: dict[str, Callable[[Floats], Floats]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}

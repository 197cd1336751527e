"""From a router's scores, of whatever kind, to one distribution over experts per token.

Letters: T tokens, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_telemetry.errors import ConfigError
from moe_telemetry.score_statistics import ScoreFunction, ScoreKind

__all__ = ["Distribution", "ScoreFunction", "ScoreKind", "as_probabilities", "read_scores"]

_TINY = torch.finfo(torch.float32).tiny
# bfloat16 rounds each probability by up to 2**-9 of itself, so their sum by no more than that
_SUM_TOLERANCE = 2.0**-7


class Distribution(NamedTuple):
    """What the scores of T tokens say; a row that is not finite shows as a value that is not finite."""

    probabilities_TE: Tensor
    """float32, a tensor of its own: each row adds up to 1."""
    negative_entropy_T: Tensor
    """Sum of p log p, in nats."""
    log_sum_T: Tensor | None
    """Log-sum-exp of the logits; None where there are none."""
    top_T: Tensor
    """Largest score of the token, as the router gave it; NaN where the row has one."""
    mean_T: Tensor
    """Mean score of the token, as the router gave it."""
    are_logits_T: Tensor | None
    """Which rows are logits, where that was told row by row."""


def as_probabilities(scores: Tensor, *, kind: ScoreKind = "auto", function: ScoreFunction = "softmax") -> Tensor:
    """Return a router's scores as probabilities over experts, never softened twice.

    Args:
        scores: float `[T, E]`.
        kind: what the scores are; `auto` costs another pass over them.
        function: the router's score function; what it gives is divided by its sum over experts.

    Returns:
        float32 `[T, E]` with rows that add up to 1.
    """
    with torch.no_grad():
        return read_scores(scores, kind, function).probabilities_TE


def read_scores(scores: Tensor, kind: ScoreKind, function: ScoreFunction) -> Distribution:
    """Return the distribution over experts of each token.

    Raises:
        ConfigError: the kind or the function is unknown, or `auto` cannot tell for this function.
    """
    if kind not in {"logits", "probabilities", "auto"}:
        raise ConfigError(f"score kind {kind!r}; expected 'logits', 'probabilities' or 'auto'")
    if function not in _FUNCTIONS:
        raise ConfigError(f"score function {function!r}; expected one of {', '.join(map(repr, _FUNCTIONS))}")
    if kind == "auto" and function == "sqrtsoftplus":
        raise ConfigError("score kind 'auto' cannot tell a sqrtsoftplus from its logits; say which they are")
    # row sums of another memory order would round otherwise, and differ from the same rows elsewhere
    scores_TE = scores.float().contiguous()
    if kind == "logits" and function == "softmax":
        return _of_softmax_logits(scores_TE)
    top_T, mean_T = scores_TE.amax(1), scores_TE.mean(1)
    if kind == "probabilities":
        return Distribution(*_normalise(scores_TE), None, top_T, mean_T, None)
    activated_TE = _FUNCTIONS[function](scores_TE)
    log_sum_T = scores_TE.logsumexp(1)
    if kind == "logits":
        return Distribution(*_normalise(activated_TE), log_sum_T, top_T, mean_T, None)
    are_probabilities_T = _look_activated(scores_TE, function)
    activated_TE = torch.where(are_probabilities_T.unsqueeze(1), scores_TE, activated_TE)
    return Distribution(*_normalise(activated_TE), log_sum_T, top_T, mean_T, ~are_probabilities_T)


def _of_softmax_logits(logits_TE: Tensor) -> Distribution:
    """Read the common kind in two passes that cost, softmax and one product.

    The largest probability gives the log-sum-exp, and with it sum(p log p) = sum(p l) - log-sum-exp.
    """
    probabilities_TE = logits_TE.softmax(1)
    top_T = logits_TE.amax(1)
    log_sum_T = top_T - probabilities_TE.amax(1).log()
    negative_entropy_T = (probabilities_TE * logits_TE).sum(1) - log_sum_T
    return Distribution(probabilities_TE, negative_entropy_T, log_sum_T, top_T, logits_TE.mean(1), None)


def _normalise(activated_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows divided by their sums, and their sums of p log p."""
    probabilities_TE = activated_TE / activated_TE.sum(1, keepdim=True).clamp_min(_TINY)
    # + tiny: log of 0 is finite, and its product with 0 is 0; log of a negative value stays NaN
    negative_entropy_T = probabilities_TE.add(_TINY).log_().mul_(probabilities_TE).sum(1)
    return probabilities_TE, negative_entropy_T


def _look_activated(scores_TE: Tensor, function: ScoreFunction) -> Tensor:
    """Return bool `[T]`: which rows have been through the score function already.

    The answer comes row by row, so it is the same however tokens are batched, and from the device.
    """
    total_T = scores_TE.sum(1)
    activated_T = (scores_TE.amin(1) >= 0) & (total_T > 0)
    if function == "softmax":
        return activated_T & ((total_T - 1).abs() < _SUM_TOLERANCE)
    return activated_T & (scores_TE.amax(1) <= 1)


# The functions are written with exp and log1p: the library's own sigmoid and softplus round the last few
# elements of a CPU tensor another way, so a row's value would depend on where in the batch it lies.
def _sigmoid(logits_TE: Tensor) -> Tensor:
    return logits_TE.neg().exp_().add_(1).reciprocal_()


def _sqrtsoftplus(logits_TE: Tensor) -> Tensor:
    return logits_TE.abs().neg_().exp_().log1p_().add_(logits_TE.clamp_min(0)).sqrt_()


def _softmax(logits_TE: Tensor) -> Tensor:
    return logits_TE.softmax(1)


_FUNCTIONS = {"softmax": _softmax, "sigmoid": _sigmoid, "sqrtsoftplus": _sqrtsoftplus}

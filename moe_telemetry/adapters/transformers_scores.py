"""What the scores of a transformers router are, read off the router itself: no list of families.

A router keeps its score function as a word (`scoring_func="sigmoid"`), as an activation
(`score_fn=Sigmoid()`), or in the code of its forward, which calls `softmax` or `sigmoid`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from moe_telemetry.score_statistics import ScoreFunction, ScoreKind

__all__ = ["ScoreTraits", "score_traits"]

_FUNCTIONS: tuple[ScoreFunction, ...] = ("sqrtsoftplus", "sigmoid", "softmax")  # in this order: one word holds another
_STATED = ("score_fn", "scoring_function", "scoring_func", "expert_selection_fn", "score_function")
# routers that return their softmax where others return logits
_GIVES_PROBABILITIES = frozenset({"DiffusionGemmaTextRouter", "Gemma4TextRouter"})
_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")


class ScoreTraits(NamedTuple):
    """The fields of `RouterSite` that say what a router's scores are."""

    score_kind: ScoreKind
    score_function: ScoreFunction
    is_biased: bool
    read_bias: Callable[[], Tensor | None] | None


def score_traits(router: nn.Module, block: nn.Module | None) -> ScoreTraits:
    """Return what the scores of `router`, a child of `block`, are."""
    classes = type(router).__mro__
    function = _function(router, block)
    bias = _read_bias(router, block)
    kind: ScoreKind = "auto" if function == "softmax" else "logits"
    if any(one.__name__ in _GIVES_PROBABILITIES for one in classes):
        kind = "probabilities"
    elif any(one.__module__.startswith("transformers.models.") for one in classes):
        kind = "logits"
    # a hash router (`tid2eid`) chooses by token id
    is_biased = bias is not None or _has_groups(router) or hasattr(router, "tid2eid")
    return ScoreTraits(kind, function, is_biased, bias)


def _function(router: nn.Module, block: nn.Module | None) -> ScoreFunction:
    for text in (*_stated(router), *_stated(getattr(router, "config", None)), *_called(router, block)):
        for function in _FUNCTIONS:
            if function in text:
                return function
    return "softmax"


def _stated(owner: Any) -> Iterator[str]:  # noqa: ANN401  # a module or a configuration
    """Yield the words for the score function that a router or its configuration keeps."""
    for name in _STATED:
        value = getattr(owner, name, None)
        if value is not None:
            yield (value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)).lower()


def _called(router: nn.Module, block: nn.Module | None) -> Iterator[str]:
    """Yield the name of what the router's forward calls, then of what its block calls to choose."""
    for code in (type(router).forward, getattr(type(block), "route_tokens_to_experts", None)):
        names = getattr(getattr(code, "__code__", None), "co_names", ())
        yield from (function for function in _FUNCTIONS if function in names)


def _read_bias(router: nn.Module, block: nn.Module | None) -> Callable[[], Tensor | None] | None:
    if getattr(router, "use_expert_bias", True) is False:
        return None
    for owner in (router, getattr(router, "moe_statics", None), block):
        for name in _BIASES:
            if isinstance(getattr(owner, name, None), Tensor):
                return partial(getattr, owner, name, None)
    return None


def _has_groups(router: nn.Module) -> bool:
    """Return whether only experts of the best groups can be chosen."""
    num_groups = getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1
    if getattr(router, "topk_method", None) == "greedy":
        return False
    return bool((getattr(router, "topk_group", None) or num_groups) < num_groups)

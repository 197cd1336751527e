"""What a router is to telemetry: where it sits, and how to read what one call of it chose.

Letters: T tokens, K experts chosen per token (top-k), E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from moe_telemetry.errors import ConfigError
from moe_telemetry.identity import RouterKey
from moe_telemetry.score_statistics import ScoreFunction, ScoreKind

__all__ = ["ReadCall", "RouterOutput", "RouterSite", "RouterSpec", "find_weight", "read_output"]


class RouterOutput(NamedTuple):
    """What one call of a router chose; one of `expert_ids` and `routing_map` is given."""

    expert_ids: Tensor | None = None
    """Integer `[..., K]`, any dtype: the experts that the tokens are dispatched to, in the router's order."""
    routing_map: Tensor | None = None
    """Bool (or 0 / 1) `[..., E]`: True where a token is dispatched to an expert."""
    scores: Tensor | None = None
    """Float `[..., E]`: logits or probabilities, as the router computed them."""
    weights: Tensor | None = None
    """Float `[..., K]`: the weight of each chosen expert."""


ReadCall = Callable[[tuple[Any, ...], Mapping[str, Any], Any], RouterOutput]
"""Reads (positional arguments, keyword arguments, output) of a module's call; output is None before it."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How to read a router that no adapter knows: the values of `watch(model, routers={...})`.

    Raises:
        ConfigError: a number is out of range.
    """

    num_experts: int
    """E, the number of experts that the router chooses from."""
    top_k: int | None = None
    """K, where it is needed to tell the expert ids from other integer outputs, or for a routing map."""
    read: ReadCall | None = None
    """Reads a call; None picks the chosen experts out of the output by shape and dtype."""
    key: RouterKey | None = None
    """The router's identity; None takes it from the module's name."""
    hook: Literal["output", "input"] = "output"
    """Whether the chosen experts are in the module's output or already in its input."""
    score_kind: ScoreKind = "auto"
    """Whether the scores are logits or have been through the score function; `auto` looks at each token."""
    score_function: ScoreFunction = "softmax"
    """What the router makes its experts' weights with."""
    is_biased: bool = False
    """Whether a bias or a group limit, too, decides the choice, and not the scores alone."""
    read_bias: Callable[[nn.Module], Tensor | None] | None = None
    """Returns the expert bias `[E]` of the router's module; None where it has none."""

    def __post_init__(self) -> None:
        """Check the numbers and words."""
        if not isinstance(self.num_experts, int) or self.num_experts < 1:
            raise ConfigError(f"RouterSpec: num_experts={self.num_experts!r}; expected a whole number, 1 or more")
        if self.top_k is not None and not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"RouterSpec: top_k={self.top_k!r}; expected 1 to num_experts={self.num_experts}")
        for name, words in (("score_kind", ScoreKind), ("score_function", ScoreFunction)):
            if getattr(self, name) not in get_args(words):
                expected = ", ".join(map(repr, get_args(words)))
                raise ConfigError(f"RouterSpec: {name}={getattr(self, name)!r}; expected one of {expected}")
        if self.score_kind == "auto" and self.score_function == "sqrtsoftplus":
            raise ConfigError("RouterSpec: a sqrtsoftplus cannot be told from its logits: state score_kind")


@dataclass(frozen=True, kw_only=True)
class RouterSite:
    """One router of a model, as an adapter found it."""

    key: RouterKey
    name: str
    """The module's name in the model, for messages."""
    module: nn.Module | None
    """The module to hook; None for a router that is fed by `Monitor.observe` alone."""
    num_experts: int
    top_k: int | None = None
    read: ReadCall
    """A module-level function, one for all layers: a function made per layer recompiles per layer."""
    hook: Literal["output", "input"] = "output"
    negative_ids_are_dropped: bool = False
    """True where an id below 0 is a choice that the capacity dropped; else it is invalid."""
    score_kind: ScoreKind = "auto"
    score_function: ScoreFunction = "softmax"
    is_biased: bool = False
    """Whether a bias or a group limit, too, decides the choice, and not the scores alone."""
    read_bias: Callable[[], Tensor | None] | None = None
    """Returns the expert bias as it is now, for use once a reduction; None where the router has none."""
    read_weight: Callable[[], Tensor | None] | None = None
    """Returns the weight that makes the scores, as it is now; None looks for it in the hooked module."""
    chooses_by_score: bool = True
    """False where experts do not come from scores (hash-routed): a replay leaves such a router alone."""
    replay_obstacle: str | None = None
    """Why routes cannot be replayed into this router from outside; None where they can."""

    def expert_bias(self) -> Tensor | None:
        """Return the expert bias `[E]` as it is now; None where there is none, or not all of it on this rank."""
        bias = self.read_bias() if self.read_bias is not None else None
        if bias is not None and hasattr(bias, "to_local"):
            bias = bias.to_local()
        return bias.detach().reshape(-1) if bias is not None and bias.numel() == self.num_experts else None

    def weight(self) -> Tensor | None:
        """Return the router's weight `[E, H]` as it is now; None where none is found, or not all on this rank."""
        if self.read_weight is not None:
            weight = self.read_weight()
        else:
            weight = find_weight(self.module, self.num_experts) if self.module is not None else None
        if weight is not None and hasattr(weight, "to_local"):
            weight = weight.to_local()
        return weight.detach() if weight is not None and len(weight) == self.num_experts else None


def find_weight(router: nn.Module, num_experts: int) -> Tensor | None:
    """Return the one matrix with a row an expert in `router`, None where there is none or there are several.

    The module's own `weight` comes first: under FSDP it is no parameter while a forward runs.
    """
    own = getattr(router, "weight", None)
    found = [own] if isinstance(own, Tensor) else [*router.parameters()]
    matrices = [tensor for tensor in found if tensor.ndim == 2 and len(tensor) == num_experts]
    return matrices[0] if len(matrices) == 1 else None


def read_output(output: object, num_experts: int, top_k: int | None = None) -> RouterOutput:
    """Pick the chosen experts out of a router's output by dtype and last dimension, in any order.

    An integer tensor with K columns is the expert ids, a bool tensor with E columns a routing map, a
    float tensor with E columns the scores, and one with K columns the weights.

    Raises:
        ConfigError: nothing in the output names experts; the message lists what is there.
    """
    tensors = list(_tensors(output))
    expert_ids = routing_map = scores = weights = None
    for tensor in tensors:
        columns = tensor.shape[-1] if tensor.ndim else 0
        if tensor.dtype == torch.bool:
            routing_map = tensor if columns == num_experts and routing_map is None else routing_map
        elif not tensor.is_floating_point():
            if expert_ids is None and tensor.ndim > 1 and _may_be_ids(columns, num_experts, top_k):
                expert_ids = tensor
        elif scores is None and columns == num_experts:
            scores = tensor
        elif weights is None and tensor.ndim > 1:
            weights = tensor
    if expert_ids is None and routing_map is None:
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors) or "no tensor"
        raise ConfigError(
            f"a router's output names no experts: found {shapes}; expected integer ids [T, K] or a bool map "
            f"[T, {num_experts}]; pass routers={{name: RouterSpec(num_experts={num_experts}, read=...)}}"
        )
    return RouterOutput(expert_ids, None if expert_ids is not None else routing_map, scores, weights)


def _may_be_ids(columns: int, num_experts: int, top_k: int | None) -> bool:
    return columns == top_k if top_k is not None else columns <= num_experts


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors(item)

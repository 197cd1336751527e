"""Read what the routers of transformers models chose; every function serves all layers of its kind.

They only pick and relabel tensors of the call, so they trace under torch.compile and never wait for
the device. The chosen experts are the dispatched ones: no top-k is redone on logits, which would miss
correction biases and group limits.
Letters: T tokens, K experts chosen per token (top-k), E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_telemetry.errors import ConfigError
from moe_telemetry.routers import RouterOutput

__all__ = [
    "read_dense_scores",
    "read_experts_input",
    "read_kept_weights",
    "read_one_hot",
    "read_router_output",
    "read_skip_expert",
    "read_sorted_choices",
]

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def read_router_output(args: Args, kwargs: Kwargs, output: object) -> RouterOutput:  # noqa: ARG001
    """Read (logits [T, E], weights [T, K], ids [T, K]) in any order: it differs between releases.

    Raises:
        ConfigError: the output has no integer tensor.
    """
    ids_TK, floats = _split(output)
    weights = next((tensor for tensor in floats if tensor.shape[-1] == ids_TK.shape[-1]), None)
    scores = next((tensor for tensor in floats if tensor.shape[-1] != ids_TK.shape[-1]), None)
    if scores is None and len(floats) > 1:  # K == E: width cannot tell, and logits come first
        scores, weights = floats[0], floats[1]
    return RouterOutput(expert_ids=ids_TK, scores=scores, weights=weights)


def read_experts_input(args: Args, kwargs: Kwargs, output: object) -> RouterOutput:  # noqa: ARG001
    """Read (hidden_states, ids [T, K], weights [T, K]) on their way into the experts.

    Raises:
        ConfigError: the input has no integer tensor.
    """
    ids_TK, floats = _split((*args, *kwargs.values()))
    weights = next((tensor for tensor in floats if tensor.shape == ids_TK.shape), None)
    return RouterOutput(expert_ids=ids_TK, weights=weights)


def read_dense_scores(args: Args, kwargs: Kwargs, output: Sequence[Tensor]) -> RouterOutput:  # noqa: ARG001
    """Read (scores [T, E], logits [T, E]), where the scores are zero for experts not chosen (llama4)."""
    scores_TE, logits_TE = output
    return RouterOutput(routing_map=scores_TE > 0, scores=logits_TE)


def read_one_hot(args: Args, kwargs: Kwargs, output: object) -> RouterOutput:  # noqa: ARG001
    """Read a one-hot mask [..., E] whose row is zero where the capacity dropped the token (switch)."""
    mask_TE, floats = _split(output)
    dropped_T1 = mask_TE.amax(-1, keepdim=True) == 0
    ids_T1 = mask_TE.argmax(-1, keepdim=True).masked_fill(dropped_T1, -1)
    return RouterOutput(expert_ids=ids_T1, scores=floats[-1])


def read_kept_weights(args: Args, kwargs: Kwargs, output: object) -> RouterOutput:  # noqa: ARG001
    """Read combine weights [T, E] that are above zero for the two experts chosen and kept (nllb).

    The mask beside them names the first expert alone. A second one that the policy did not sample
    looks like one that the capacity dropped.
    """
    _, floats = _split(output)
    weights_TK, ids_TK = floats[0].detach().topk(2, dim=-1)
    ids_TK = ids_TK.masked_fill(weights_TK == 0, -1)
    return RouterOutput(expert_ids=ids_TK, scores=floats[-1] if len(floats) > 1 else None, weights=weights_TK)


def read_skip_expert(args: Args, kwargs: Kwargs, output: object) -> RouterOutput:
    """Read a router whose last expert skips the layer, shown as expert 0 with weight 0 (zaya)."""
    read = read_router_output(args, kwargs, output)
    assert read.expert_ids is not None  # noqa: S101
    assert read.scores is not None  # noqa: S101
    assert read.weights is not None  # noqa: S101
    ids_TK = read.expert_ids.masked_fill(read.weights == 0, read.scores.shape[-1] - 1)
    return read._replace(expert_ids=ids_TK)


def read_sorted_choices(args: Args, kwargs: Kwargs, output: Sequence[Any]) -> RouterOutput:  # noqa: ARG001
    """Read (order [T*K], ..., tokens of each expert, logits [T, E]): choices sorted by expert (jetmoe)."""
    order, sizes, logits_TE = output[0], output[3], output[-1]
    num_tokens, num_experts = logits_TE.shape
    # the sizes are a list: the router itself has waited for the device to make it
    sizes_E = torch.tensor(sizes, device=order.device)
    experts_E = torch.arange(num_experts, device=order.device)
    experts = experts_E.repeat_interleave(sizes_E, output_size=order.numel())
    ids = torch.empty_like(order).scatter_(0, order, experts)
    return RouterOutput(expert_ids=ids.view(num_tokens, order.numel() // max(num_tokens, 1)), scores=logits_TE)


def _split(output: object) -> tuple[Tensor, list[Tensor]]:
    """Return the first integer tensor and all float tensors."""
    items = output if isinstance(output, (tuple, list)) else (output,)
    tensors = [item for item in items if isinstance(item, Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    for tensor in tensors:
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return tensor, floats
    shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors) or "no tensor"
    raise ConfigError(
        f"a router's call names no experts: found {shapes}; expected integer ids [T, K]; "
        "pass routers={name: RouterSpec(num_experts=..., read=...)}"
    )

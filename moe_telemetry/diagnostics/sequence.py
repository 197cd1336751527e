"""The compact per-sequence tensor: scores, loads, bias and margin of each sequence of a microbatch.

The layout and the formulas are those of Megatron-LM's router diagnostics, so that tools for one read
the other.

Letters: T tokens, S positions, B sequences, E experts; row = s * B + b.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from moe_telemetry.errors import ConfigError, MaskError

__all__ = ["ROUTER_DIAGNOSTIC_CHANNEL_COUNT", "RouterDiagnosticChannel", "build_router_diagnostics"]


class RouterDiagnosticChannel(IntEnum):
    """Second index of the tensor of `build_router_diagnostics`."""

    MEAN_SCORE = 0
    """Per expert: mean score over valid tokens."""
    AUX_LOAD = 1
    """Per expert: share of the assignments that the auxiliary loss sees."""
    ACTUAL_LOAD = 2
    """Per expert: share of the assignments that are dispatched."""
    EXPERT_BIAS = 3
    """Per expert: the selection bias."""
    AUX_ACTUAL_OVERLAP = 4
    """Scalar: share of the auxiliary assignments that are dispatched too."""
    VALID_TOKEN_COUNT = 5
    """Scalar: tokens that are no padding."""
    TOPK_BOUNDARY_RELATIVE_MARGIN = 6
    """Scalar: mean gap between the lowest chosen and the highest unchosen score, over the former."""


ROUTER_DIAGNOSTIC_CHANNEL_COUNT = len(RouterDiagnosticChannel)
"""Number of channels of `build_router_diagnostics`."""


@torch.no_grad()
def build_router_diagnostics(
    scores_for_aux_loss: Tensor,
    routing_map_for_aux_loss: Tensor,
    actual_routing_map: Tensor,
    expert_bias: Tensor | None,
    seq_length: int,
    batch_size: int,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Summarise one router call by sequence, without waiting for the device.

    Every channel is the quotient of two sums over the sequence's valid tokens, 0 where it has none.
    A score that is not finite in a valid row shows in its own sequence's mean score and margin and
    nowhere else; in a padded row it shows nowhere.

    Args:
        scores_for_aux_loss: float `[T, E]`, T = S * B, row = s * B + b: probabilities, or any scores
            that are not negative (`as_probabilities` makes them of logits, and leaves probabilities).
        routing_map_for_aux_loss: bool (or 0 / 1) `[T, E]`: the choice by score alone.
        actual_routing_map: bool (or 0 / 1) `[T, E]`: the choice that is dispatched.
        expert_bias: float `[E]`, None where the router has none.
        seq_length: S, positions of each sequence on this rank.
        batch_size: B, sequences of the microbatch.
        padding_mask: True = padding, `[T]` or `[S, B]`; None where every token is real.

    Returns:
        float32 `[B, ROUTER_DIAGNOSTIC_CHANNEL_COUNT, E]`, indexed by `RouterDiagnosticChannel`. Channels 0
        to 3 hold a value per expert, 4 to 6 a scalar in element 0 and zeros after it.

    Raises:
        ConfigError: a shape does not fit, a size is not positive, or E < 2 (a `ValueError`).
        MaskError: the mask has another shape (a `ValueError`).
    """
    _check(scores_for_aux_loss, seq_length, batch_size)
    shape = (seq_length, batch_size, scores_for_aux_loss.shape[1])
    aux_SBE = _map(routing_map_for_aux_loss, "routing_map_for_aux_loss", scores_for_aux_loss, shape)
    actual_SBE = _map(actual_routing_map, "actual_routing_map", scores_for_aux_loss, shape)
    scores_SBE = scores_for_aux_loss.float().reshape(shape)
    valid_SB1 = _valid(padding_mask, seq_length, batch_size, scores_SBE)
    if padding_mask is not None:
        # chosen by where, not multiplied by 0: a NaN of a padded row would survive the product
        scores_SBE = torch.where(valid_SB1, scores_SBE, 0.0)
        aux_SBE, actual_SBE = aux_SBE & valid_SB1, actual_SBE & valid_SB1
    out = _channels(scores_SBE, aux_SBE, actual_SBE, valid_SB1)
    if expert_bias is not None:
        out[:, RouterDiagnosticChannel.EXPERT_BIAS] = _bias(expert_bias, shape[2])
    return out


def _channels(scores_SBE: Tensor, aux_SBE: Tensor, actual_SBE: Tensor, valid_SB1: Tensor) -> Tensor:
    """Return every channel but the bias, of maps and scores that are zero in padded rows."""
    _, batch_size, num_experts = scores_SBE.shape
    valid_B = _counts(valid_SB1, (0, 2))
    aux_BE = _counts(aux_SBE, 0)
    common_B = _counts(aux_SBE & actual_SBE, (0, 2))
    out = scores_SBE.new_zeros(batch_size, ROUTER_DIAGNOSTIC_CHANNEL_COUNT, num_experts)
    out[:, RouterDiagnosticChannel.MEAN_SCORE] = scores_SBE.sum(0) / valid_B.clamp_min(1).unsqueeze(1)
    out[:, RouterDiagnosticChannel.AUX_LOAD] = _shares(aux_BE)
    out[:, RouterDiagnosticChannel.ACTUAL_LOAD] = _shares(_counts(actual_SBE, 0))
    out[:, RouterDiagnosticChannel.AUX_ACTUAL_OVERLAP, 0] = common_B / aux_BE.sum(1).clamp_min(1)
    out[:, RouterDiagnosticChannel.VALID_TOKEN_COUNT, 0] = valid_B
    out[:, RouterDiagnosticChannel.TOPK_BOUNDARY_RELATIVE_MARGIN, 0] = _margin(scores_SBE, aux_SBE)
    return out


def _counts(is_counted: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    # int32 holds any sequence, and the sum of bools to int64 makes a copy of eight times their size
    return is_counted.sum(dims, dtype=torch.int32).float()


def _shares(counts_BE: Tensor) -> Tensor:
    return counts_BE / counts_BE.sum(1, keepdim=True).clamp_min(1)


def _margin(scores_SBE: Tensor, aux_SBE: Tensor) -> Tensor:
    """Return `[B]`: the mean over tokens that have both a chosen and an unchosen expert."""
    # a padded row has nothing chosen, so it takes no part
    floor_SB = torch.where(aux_SBE, scores_SBE, torch.inf).amin(2)
    ceiling_SB = scores_SBE.masked_fill(aux_SBE, -torch.inf).amax(2)
    chosen_SB = aux_SBE.sum(2, dtype=torch.int32)
    has_both_SB = (chosen_SB > 0) & (chosen_SB < aux_SBE.shape[2])
    eps = torch.finfo(torch.float32).eps
    relative_SB = (floor_SB - ceiling_SB).clamp_min(0) / floor_SB.clamp_min(eps)
    total_B = torch.where(has_both_SB, relative_SB, 0.0).sum(0)
    return total_B / has_both_SB.sum(0).clamp_min(1)


def _check(scores: Tensor, seq_length: int, batch_size: int) -> None:
    if seq_length < 1 or batch_size < 1:
        raise ConfigError(f"seq_length={seq_length}, batch_size={batch_size}; expected 1 or more of each")
    if not scores.is_floating_point():
        raise ConfigError(f"scores_for_aux_loss is {scores.dtype}; expected a floating-point tensor [T, E]")
    if scores.ndim != 2 or scores.shape[0] != seq_length * batch_size:
        raise _unfit("scores_for_aux_loss", scores, f"[{seq_length * batch_size}, E] (seq_length * batch_size rows)")
    if scores.shape[1] < 2:
        raise _unfit("scores_for_aux_loss", scores, f"[{scores.shape[0]}, E] with two experts or more")


def _map(routing_map: Tensor, name: str, scores: Tensor, shape: Sequence[int]) -> Tensor:
    if routing_map.shape != scores.shape:
        raise _unfit(name, routing_map, f"{list(scores.shape)}, the shape of scores_for_aux_loss")
    return (routing_map if routing_map.dtype == torch.bool else routing_map != 0).reshape(shape)


def _bias(expert_bias: Tensor, num_experts: int) -> Tensor:
    if expert_bias.shape != (num_experts,):
        raise _unfit("expert_bias", expert_bias, f"[{num_experts}], one value per expert")
    return expert_bias.float()


def _valid(padding_mask: Tensor | None, seq_length: int, batch_size: int, like: Tensor) -> Tensor:
    """Return bool `[S, B, 1]`: the axis of experts is added, so that no square case broadcasts along it."""
    if padding_mask is None:
        return torch.ones(seq_length, batch_size, 1, dtype=torch.bool, device=like.device)
    num_tokens = seq_length * batch_size
    if padding_mask.shape not in {(num_tokens,), (seq_length, batch_size)}:
        raise MaskError(
            f"padding_mask has shape {list(padding_mask.shape)}; expected [{num_tokens}] or "
            f"[{seq_length}, {batch_size}] (sequence-major: row = s * batch_size + b)"
        )
    return (padding_mask == 0).reshape(seq_length, batch_size, 1)


def _unfit(name: str, tensor: Tensor, expected: str) -> ConfigError:
    return ConfigError(f"{name} has shape {list(tensor.shape)}; expected {expected}")

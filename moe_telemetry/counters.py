"""Device counters of one router, and the operator that adds a router call to them.

A router with E experts has E + 3 counters in each stage slot: ids below 0, the experts, ids of E and
above, and the choices of padding. Every choice lands in exactly one of them, so that

    tokens = (below + experts + above) / K        padding tokens = padding / K

need no counter of their own and a call costs one scatter. Counters are int64 and only ever grow. One
more cell holds K, where nothing but the call itself tells it.

Letters: T tokens, K experts chosen per token (top-k), E experts, W cells of a router, S stage slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_telemetry.errors import ConfigError
from moe_telemetry.masks import fit_mask
from moe_telemetry.operators import define_operator, is_recompute

__all__ = ["NUM_SLOTS", "UNCOUNTED_SLOT", "count_choices", "new_cells", "slot_value"]

NUM_SLOTS = 8
"""Stage slots of every cell: seven stages, and one that is never read."""

UNCOUNTED_SLOT = NUM_SLOTS - 1
"""Where calls go while the monitor is paused."""

_NUM_OTHER_CELLS = 4

_ones_of_device: dict[torch.device, Tensor] = {}


def new_cells(num_experts: int, device: torch.device) -> Tensor:
    """Return zeroed cells `[W, S]` int64, W = E + 4, for a router with `num_experts` experts."""
    with torch.inference_mode(mode=False):
        return torch.zeros(num_experts + _NUM_OTHER_CELLS, NUM_SLOTS, dtype=torch.int64, device=device)


def slot_value(slot: int) -> int:
    """Return what a slot tensor holds for stage slot `slot`: its offset in the row of expert 0."""
    return NUM_SLOTS + slot


def count_choices(
    cells_WS: Tensor, slot: Tensor, choices: Tensor, valid: Tensor | None, *, top_k: int, strict: bool
) -> None:
    """Add one router call to its cells; nothing is added while activation checkpointing recomputes.

    Args:
        cells_WS: int64 `[W, S]`, added to in place.
        slot: int64 scalar on the same device, `slot_value` of the stage; read on the device, so that
            stages and pauses also hold when a captured graph is replayed.
        choices: integer expert ids `[..., K]`, or a bool routing map `[..., E]`.
        valid: True for real tokens, `[B, S]` or `[T]`; None where all are real.
        top_k: K, or 0 to take it from the ids; a routing map with fewer choices dropped the others.
        strict: whether a mask that does not fit raises `MaskError`, or is reported and not used.
    """
    _call(cells_WS, slot, choices, valid, top_k, strict)


def _count(  # the operator's schema has positional arguments only
    cells_WS: Tensor,
    slot: Tensor,
    choices: Tensor,
    valid: Tensor | None,
    top_k: int,
    strict: bool,  # noqa: FBT001
) -> None:
    if is_recompute():
        return
    # a call is made of few small operations, so one that would change nothing is left out
    rows = choices if choices.ndim == 2 else choices.reshape(-1, choices.shape[-1])
    valid_T = None if valid is None else fit_mask(valid, rows.shape[0], strict=strict)
    if rows.dtype == torch.bool:
        _add_map(cells_WS, slot, rows, valid_T, top_k)
    else:
        _add_ids(cells_WS, slot, rows, valid_T)
        if top_k == 0:
            cells_WS[-1].fill_(rows.shape[1])


def _add_ids(cells_WS: Tensor, slot: Tensor, ids_TK: Tensor, valid_T: Tensor | None) -> None:
    num_experts = cells_WS.shape[0] - _NUM_OTHER_CELLS
    # int64 first: uint16 has no clamp on the CPU
    wide_TK = ids_TK if ids_TK.dtype == torch.int64 else ids_TK.to(torch.int64)
    cell_TK = wide_TK.clamp(-1, num_experts)
    if valid_T is not None:
        cell_TK = torch.where(valid_T.unsqueeze(1), cell_TK, num_experts + 1)
    index_TK = torch.add(slot, cell_TK, alpha=NUM_SLOTS).view(-1)
    cells_WS.view(-1).scatter_add_(0, index_TK, _ones(index_TK.numel(), cells_WS.device))


def _add_map(cells_WS: Tensor, slot: Tensor, map_TE: Tensor, valid_T: Tensor | None, top_k: int) -> None:
    num_tokens, num_experts = map_TE.shape
    if num_experts != cells_WS.shape[0] - _NUM_OTHER_CELLS:
        raise ConfigError(f"routing map has {num_experts} columns; expected {cells_WS.shape[0] - _NUM_OTHER_CELLS}")
    added_W = torch.zeros(num_experts + 3, dtype=torch.int64, device=cells_WS.device)
    if valid_T is not None:
        map_TE = map_TE & valid_T.unsqueeze(1)
    added_W[1:-2] = map_TE.sum(0)
    num_valid = num_tokens if valid_T is None else valid_T.sum()
    added_W[0] = num_valid * top_k - added_W.sum()
    added_W[-1] = (num_tokens - num_valid) * top_k
    row_W = torch.arange(-1, num_experts + 2, device=cells_WS.device)
    cells_WS.view(-1).scatter_add_(0, torch.add(slot, row_W, alpha=NUM_SLOTS), added_W)


def _ones(count: int, device: torch.device) -> Tensor:
    """Return `count` ones; a kept vector is a third of the time of an expanded scalar on the CPU."""
    held = _ones_of_device.get(device)
    if held is None or held.numel() < count:
        with torch.inference_mode(mode=False):
            held = torch.ones(count, dtype=torch.int64, device=device)
        # memory of a graph's private pool must not outlive the capture
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _ones_of_device[device] = held
    return held if held.numel() == count else held[:count]


_call = define_operator(
    "count(Tensor(a!) cells_WS, Tensor slot, Tensor choices, Tensor? valid, int top_k, bool strict) -> ()", _count
)

"""Seat routes on the rows of a router call: which token's route belongs to which row.

Letters: T rows, L router layers, K experts chosen per token (top-k), B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_telemetry.errors import RoutesError
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay import Routes

__all__ = ["Rows", "seat_routes"]


class Rows:
    """Routes of all routers in the order of a router's rows."""

    def __init__(self, ids_TLK: Tensor, starts_T: Tensor, keys: Mapping[RouterKey, int]) -> None:
        self._ids_TLK = ids_TLK
        self._keys = keys
        self.starts_T = starts_T
        """int64: the rows that begin a sequence."""

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self._ids_TLK)

    def ids_of(self, key: RouterKey) -> Tensor:
        """Return int32 `[T, K]`, the routes of one router."""
        return self._ids_TLK[:, self._keys[key]]


def seat_routes(routes: Routes, num_rows: int, mask: Tensor | None, device: torch.device) -> Rows:
    """Return the routes for a router call of T = `num_rows` rows, batch-first or packed.

    With as many routes as rows, they follow one another. Else the rows are B sequences of S positions,
    and the mask `[B, S]` tells which of them are tokens: the first real position of a sequence gets
    its first route, whichever side the padding is on.

    Raises:
        RoutesError: the routes are for another number of tokens; the message gives both.
    """
    keys = {key: layer for layer, key in enumerate(routes.keys)}
    num_tokens, num_sequences = len(routes.ids), len(routes.sequence_lengths)
    if num_tokens == num_rows:
        return Rows(routes.ids.to(device), routes.sequence_starts().to(device), keys)
    if mask is None or mask.ndim != 2 or mask.numel() != num_rows or len(mask) != num_sequences:
        raise RoutesError(
            f"routes of {num_tokens} tokens in {num_sequences} sequences do not fit a router call of {num_rows} rows"
            f"{'' if mask is None else f' with a mask of shape {tuple(mask.shape)}'}; expected one route a row, or "
            "an attention mask [B, S] with one row a sequence"
        )
    length = num_rows // num_sequences
    padded_BSLK = routes.to_layout("bsh", length=length).to(device)
    position_BS = ((mask > 0).cumsum(1) - 1).clamp(min=0)
    index_BSLK = position_BS[:, :, None, None].expand_as(padded_BSLK)
    ids_TLK = padded_BSLK.gather(1, index_BSLK).flatten(0, 1)
    return Rows(ids_TLK, torch.arange(0, num_rows, length, device=device), keys)

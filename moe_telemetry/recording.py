"""Record the experts that the routers choose, as routes."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_telemetry.errors import RoutesError
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay import Routes

__all__ = ["Recording"]


class Recording:
    """The router calls of the forwards of one `with monitor.record()` block."""

    def __init__(self, num_experts: dict[RouterKey, int]) -> None:
        self._num_experts = num_experts
        self._calls: dict[RouterKey, list[Tensor]] = {key: [] for key in num_experts}
        self._lengths: dict[RouterKey, list[int]] = {key: [] for key in num_experts}

    def add(self, key: RouterKey, expert_ids: Tensor, valid_T: Tensor | None, batch_size: int) -> None:
        """Keep one router call; a padding row has no route."""
        ids_TK = expert_ids.detach().reshape(-1, expert_ids.shape[-1]).to(torch.int32, copy=True)
        if valid_T is not None:
            ids_TK.masked_fill_(~valid_T.unsqueeze(1), -1)
        sequences = batch_size if len(ids_TK) % batch_size == 0 else 1
        self._calls[key].append(ids_TK)
        self._lengths[key] += [len(ids_TK) // sequences] * sequences

    def routes(self) -> Routes:
        """Return what was recorded so far: all forwards, one after another, padding rows as -1.

        Raises:
            RoutesError: nothing was recorded, or the routers saw different numbers of tokens.
        """
        seen = {key: torch.cat(calls) for key, calls in self._calls.items() if calls}
        if not seen:
            raise RoutesError("nothing was recorded: run the model inside `with monitor.record()`, in eager mode")
        shapes = {tuple(ids.shape) for ids in seen.values()}
        if len(shapes) > 1:
            raise RoutesError(f"routers saw calls of different sizes {sorted(shapes)}; expected one [T, K] for all")
        ids_TLK = torch.stack([ids.cpu() for ids in seen.values()], dim=1)
        sizes = {self._num_experts[key] for key in seen}
        return Routes(
            ids=ids_TLK,
            sequence_lengths=tuple(self._lengths[next(iter(seen))]),
            keys=tuple(seen),
            num_experts=sizes.pop() if len(sizes) == 1 else None,
        )

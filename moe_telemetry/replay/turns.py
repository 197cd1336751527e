"""Routes that belong together: the turns of one sequence, the samples of one batch.

Letters: T tokens, L router layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_telemetry.errors import RoutesError
from moe_telemetry.replay.lazy import MAX_IDS

if TYPE_CHECKING:
    from moe_telemetry.replay.routes import Routes

__all__ = ["check_alike", "join_turns"]


def check_alike(samples: Sequence[Routes]) -> Routes:
    """Return the first of several routes that have the same routers, K, E and slicing.

    Raises:
        RoutesError: they do not, or there is none.
    """
    if not samples:
        raise RoutesError("no routes to put together; expected at least one")
    first = samples[0]
    for other in samples[1:]:
        if other.keys != first.keys or other.ids.shape[2] != first.ids.shape[2]:
            raise RoutesError(
                f"routes of {len(first.keys)} routers with K={first.ids.shape[2]} and of {len(other.keys)} routers "
                f"with K={other.ids.shape[2]} cannot be put together; expected the same routers"
            )
        if other.num_experts != first.num_experts or other.chunks != first.chunks:
            raise RoutesError(
                f"routes with num_experts={first.num_experts}, chunks={first.chunks} and num_experts="
                f"{other.num_experts}, chunks={other.chunks} cannot be put together"
            )
    return first


def join_turns(turns: Sequence[Routes | None], starts: Sequence[int] | None) -> tuple[Tensor, Routes]:
    """Return int32 `[T, L, K]` of the whole sequence, -1 where no turn has a route, and the first turn.

    Raises:
        RoutesError: see `Routes.join`.
    """
    placed = _placed(turns, starts)
    first = check_alike([turn for _, turn in placed])
    num_tokens = max(start + len(turn.ids) for start, turn in placed)
    if num_tokens * first.ids[0].numel() > MAX_IDS:
        raise RoutesError(f"joined turns have {num_tokens} tokens; expected at most {MAX_IDS} ids")
    ids_TLK = torch.full((num_tokens, *first.ids.shape[1:]), -1, dtype=torch.int32, device=first.ids.device)
    for start, turn in placed:
        span = ids_TLK[start : start + len(turn.ids)]
        # a turn's last row may be missing where the next turn's first row has it, or the other way round
        has_route = (turn.ids >= 0).any(-1, keepdim=True)
        span.copy_(torch.where(has_route, turn.ids, span))
    return ids_TLK, first


def _placed(turns: Sequence[Routes | None], starts: Sequence[int] | None) -> list[tuple[int, Routes]]:
    if starts is not None and len(starts) != len(turns):
        raise RoutesError(f"{len(starts)} starts for {len(turns)} turns; expected one each")
    placed: list[tuple[int, Routes]] = []
    end = 0
    for number, turn in enumerate(turns):
        if turn is None and starts is None:
            break
        if turn is None:
            continue
        if len(turn.sequence_lengths) != 1:
            raise RoutesError(f"turn {number} has {len(turn.sequence_lengths)} sequences; expected one")
        start = end if starts is None else starts[number]
        if start < 0:
            raise RoutesError(f"turn {number} starts at token {start}; expected 0 or more")
        placed.append((start, turn))
        end = start + len(turn.ids)
    if not placed:
        raise RoutesError("the first turn has no routes, so there is nothing to join")
    return placed

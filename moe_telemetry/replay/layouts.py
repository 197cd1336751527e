"""Routes in the order of a router's rows, and cut as context parallelism cuts tokens.

Letters: T tokens, L router layers, K experts a token, B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_telemetry.errors import RoutesError
from moe_telemetry.replay.lazy import MAX_IDS
from moe_telemetry.replay.order import check_layout

__all__ = ["lay_out", "slice_for_rank"]


def lay_out(
    ids_TLK: Tensor,
    sequence_lengths: Sequence[int],
    layout: str,
    *,
    length: int | None,
    multiple_of: int,
    num_rows: int | None,
    padding_side: str,
) -> Tensor:
    """Return ids as `Routes.to_layout` says; errors as there."""
    check_layout(layout)
    if padding_side not in {"left", "right"}:
        raise RoutesError(f"padding_side={padding_side!r}; expected 'left' or 'right'")
    lengths = [len(ids_TLK)] if layout == "packed" else list(sequence_lengths)
    padded = _padded_length(max(lengths, default=0), length, multiple_of)
    rows = padded * max(len(lengths), 1)
    if num_rows is not None and rows != num_rows:
        raise RoutesError(
            f"routes have {rows} rows ({len(ids_TLK)} tokens, padded), the router {num_rows}; "
            "expected the same: is the padding a multiple of the same parallel size?"
        )
    if rows * ids_TLK[0].numel() > MAX_IDS:
        raise RoutesError(f"routes padded to {rows} rows; expected at most {MAX_IDS} ids")
    out_BSLK = torch.full((len(lengths), padded, *ids_TLK.shape[1:]), -1, dtype=ids_TLK.dtype, device=ids_TLK.device)
    for row_SLK, piece in zip(out_BSLK, ids_TLK.split(lengths), strict=True):
        begin = padded - len(piece) if padding_side == "left" else 0
        row_SLK[begin : begin + len(piece)] = piece
    if layout == "packed":
        return out_BSLK[0]
    return out_BSLK if layout == "bsh" else out_BSLK.transpose(0, 1).contiguous()


def _padded_length(longest: int, length: int | None, multiple_of: int) -> int:
    if multiple_of < 1:
        raise RoutesError(f"multiple_of={multiple_of}; expected 1 or more")
    if length is not None and length < longest:
        raise RoutesError(f"length={length} is shorter than the longest sequence, {longest} tokens")
    return -(-(longest if length is None else length) // multiple_of) * multiple_of


def slice_for_rank(
    ids_TLK: Tensor, sequence_lengths: Sequence[int], rank: int, size: int, order: str
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the rows of one context-parallel rank and how many each sequence has; see `Routes.for_rank`."""
    if order not in {"contiguous", "zigzag"}:
        raise RoutesError(f"order={order!r}; expected 'contiguous' or 'zigzag'")
    if size < 1 or not 0 <= rank < size:
        raise RoutesError(f"rank {rank} of {size}: expected a rank from 0 to size - 1")
    num_pieces = size if order == "contiguous" else 2 * size
    held = [rank] if order == "contiguous" else [rank, 2 * size - 1 - rank]
    slices, lengths = [], []
    for sequence in ids_TLK.split(list(sequence_lengths)):
        piece_length = -(-len(sequence) // num_pieces)
        for piece in held:
            rows = sequence[piece * piece_length : (piece + 1) * piece_length]
            missing = rows.new_full((piece_length - len(rows), *rows.shape[1:]), -1)
            slices.append(torch.cat([rows, missing]))
        lengths.append(piece_length * len(held))
    return torch.cat(slices), tuple(lengths)

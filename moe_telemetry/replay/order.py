"""Which row is the row before: the order of tokens in flattened `[T, K]` rows.

    bsh      batch-first, row = b * S + s: stride 1, a sequence starts every S rows
    sbh      sequence-first, row = s * B + b: stride B, the first B rows start the sequences
    packed   sequences of any lengths, one after another: stride 1, starts are given

Letters: T rows (tokens), B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moe_telemetry.errors import RoutesError

__all__ = ["Layout", "SequenceStarts", "TokenOrder", "check_layout", "previous_rows", "starts_mask", "token_order"]

Layout = Literal["bsh", "sbh", "packed"]
"""How the rows of sequences follow one another."""

SequenceStarts = Tensor | Sequence[int]
"""Bool `[T]`, True on the first row of each sequence; or integer row numbers of the first rows.

Cumulative lengths (`cu_seqlens`) are row numbers too: their last entry, T, starts nothing.
"""


class TokenOrder(NamedTuple):
    """How to step from a row to the next row of its sequence: keywords of `compare_routes`."""

    row_stride: int
    """Rows from a token to the next one of its sequence."""
    sequence_starts: Tensor | None
    """Bool `[T]`, or None where only the first `row_stride` rows start a sequence."""


def check_layout(layout: str) -> None:
    """Check the name of a layout.

    Raises:
        RoutesError: there is no such layout.
    """
    if layout not in get_args(Layout):
        raise RoutesError(f"layout {layout!r}: expected one of {', '.join(get_args(Layout))}")


def token_order(
    layout: Layout,
    *,
    num_rows: int,
    batch_size: int = 1,
    sequence_starts: SequenceStarts | None = None,
    device: torch.device | str | None = None,
) -> TokenOrder:
    """Return the order of T = `num_rows` flattened rows; `sequence_starts` adds starts to any layout.

    Raises:
        RoutesError: the layout is unknown, or T rows are not whole sequences of one length.
    """
    check_layout(layout)
    if batch_size < 1 or (layout != "packed" and num_rows % batch_size):
        raise RoutesError(f"{num_rows} rows are not batch_size={batch_size} sequences of one length")
    starts_T = None if sequence_starts is None else starts_mask(sequence_starts, num_rows, device)
    if layout == "sbh":
        return TokenOrder(batch_size, starts_T)
    if layout == "bsh" and num_rows:
        first_T = torch.arange(num_rows, device=device) % (num_rows // batch_size) == 0
        return TokenOrder(1, first_T if starts_T is None else first_T | starts_T)
    return TokenOrder(1, starts_T)


def starts_mask(sequence_starts: SequenceStarts, num_rows: int, device: torch.device | str | None = None) -> Tensor:
    """Return bool `[T]`, True on the first row of each sequence; nothing is read from the device.

    Raises:
        RoutesError: a mask has another length than T = `num_rows`, or the dtype says neither mask nor rows.
    """
    starts = torch.as_tensor(sequence_starts, device=device)
    if starts.dtype == torch.bool:
        if starts.shape != (num_rows,):
            raise RoutesError(f"sequence_starts has shape {tuple(starts.shape)}; expected ({num_rows},), one per row")
        return starts
    if starts.is_floating_point() or starts.is_complex():
        raise RoutesError(f"sequence_starts is {starts.dtype}; expected a bool mask or integer row numbers")
    # one more slot than rows: the last of cumulative lengths, and what lies beyond, falls off the end
    rows_N = starts.reshape(-1).long().clamp(0, num_rows)
    mask = torch.zeros(num_rows + 1, dtype=torch.bool, device=starts.device)
    return mask.index_fill_(0, rows_N, True)[:num_rows]


def previous_rows(
    num_rows: int,
    *,
    row_stride: int = 1,
    sequence_starts: SequenceStarts | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return int64 `[T]`: for each row the row before it in token order of the same sequence, or -1.

    Raises:
        RoutesError: `sequence_starts` does not fit T = `num_rows`.
    """
    rows_T = torch.arange(num_rows, device=device) - row_stride
    previous_T = rows_T.clamp_(min=-1)
    if sequence_starts is None:
        return previous_T
    return previous_T.masked_fill_(starts_mask(sequence_starts, num_rows, device), -1)

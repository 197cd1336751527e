"""Where a row sits: its sequence and its position, and back from there to the row.

Letters: T rows (tokens), N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_telemetry.errors import RoutesError
from moe_telemetry.replay.order import SequenceStarts, starts_mask

__all__ = ["Geometry"]


@dataclass(frozen=True, eq=False)
class Geometry:
    """Sequence and position of each of T rows, on the CPU."""

    sequence_T: Tensor
    position_T: Tensor
    first_row_N: Tensor
    length_N: Tensor
    row_stride: int

    @classmethod
    def of(
        cls,
        num_rows: int,
        *,
        sequence_starts: SequenceStarts | None = None,
        row_stride: int = 1,
        batch_size: int | None = None,
    ) -> Geometry:
        """Return where T = `num_rows` rows sit.

        Sequence-first rows have `row_stride` sequences; `batch_size` splits other rows into sequences
        of one length; otherwise `sequence_starts` says where sequences start.

        Raises:
            RoutesError: the rows do not split into sequences like that.
        """
        rows_T = torch.arange(num_rows)
        if row_stride > 1:
            first_N = torch.arange(min(row_stride, num_rows))
            length_N = (num_rows - first_N + row_stride - 1) // row_stride
            return cls(rows_T % row_stride, rows_T // row_stride, first_N, length_N, row_stride)
        if batch_size is not None:
            if batch_size < 1 or num_rows % batch_size:
                raise RoutesError(f"{num_rows} rows are not batch_size={batch_size} sequences of one length")
            starts_T = rows_T % max(num_rows // batch_size, 1) == 0
        elif sequence_starts is None:
            starts_T = rows_T == 0
        else:
            # a copy: the caller's own mask is not written to
            starts_T = starts_mask(sequence_starts, num_rows).cpu() | (rows_T == 0)
        first_N = starts_T.nonzero()[:, 0]
        length_N = torch.diff(first_N, append=torch.tensor([num_rows]))
        sequence_T = starts_T.cumsum(0) - 1
        return cls(sequence_T, rows_T - first_N[sequence_T], first_N, length_N, 1)

    @property
    def num_sequences(self) -> int:
        """N, the number of sequences."""
        return len(self.first_row_N)

    @property
    def common_length(self) -> int | None:
        """The length of all sequences, or None where they differ."""
        lengths = self.length_N.unique()
        return int(lengths) if len(lengths) == 1 else None

    def row_of(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Return the row at each position of each sequence, or -1 where the sequence has no such position."""
        row = self.first_row_N[sequence] + position * self.row_stride
        outside = (position < 0) | (position >= self.length_N[sequence])
        return row.masked_fill(outside, -1)

    def in_token_order(self) -> Tensor:
        """Return int64 `[T]`: the rows, one sequence after another."""
        longest = int(self.length_N.max()) if self.num_sequences else 1
        return torch.argsort(self.sequence_T * longest + self.position_T)

"""The class of every replayed row: what a replay may use as given, and what it may not.

Letters: T tokens, K experts chosen per token (top-k), E experts.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F  # noqa: N812  # the field's own name for it
from torch import Tensor

from moe_telemetry.errors import MaskError, RoutesError
from moe_telemetry.replay.order import SequenceStarts, starts_mask
from moe_telemetry.replay.overlap import NarrowIds, has_repeats, narrow_ids

__all__ = ["RowClass", "check_ids", "class_of_rows", "classify_rows", "equal_run_lengths", "usable_rows"]


class RowClass(IntEnum):
    """What a replayed row is, in the order in which the rules apply; negative on tokens that are padding."""

    ROUTED_PADDING = -2
    """Padding that carries a route."""
    PADDING = -1
    """Padding without a route."""
    MISSING = 0
    """All ids negative: there is no route."""
    MALFORMED = 1
    """Some ids negative, but not all."""
    OUT_OF_RANGE = 2
    """Some id is E or more."""
    REPEATED = 3
    """An id occurs twice."""
    PLACEHOLDER = 4
    """Equal to the row before it in token order of the same sequence."""
    CHECKED = 5
    """Everything else."""


def classify_rows(
    replayed: Tensor,
    *,
    num_experts: int,
    valid: Tensor | None = None,
    sequence_starts: SequenceStarts | None = None,
    row_stride: int = 1,
) -> Tensor:
    """Return int8 `[T]`, the `RowClass` of each row of `replayed` `[T, K]`, without a host sync.

    `valid` is bool `[T]`, True on real tokens; a row after padding starts a sequence. `row_stride` is
    how many rows lie between a token and the next one of its sequence (see `token_order`).

    Raises:
        RoutesError: the shape, the dtype or a number does not fit.
        MaskError: `valid` does not fit.
    """
    check_ids(replayed, num_experts, "replayed")
    return class_of_rows(narrow_ids(replayed, num_experts), valid, sequence_starts, row_stride)


def usable_rows(classes_T: Tensor) -> Tensor:
    """Return bool `[T]`: rows that a replay uses as given; everywhere else the router's own choice stands."""
    return classes_T >= RowClass.PLACEHOLDER.value


def check_ids(ids: Tensor, num_experts: int, name: str) -> None:
    """Check that `ids` are rows `[T, K]` of integers.

    Raises:
        RoutesError: they are not, or K does not fit E = `num_experts`.
    """
    if ids.ndim != 2 or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise RoutesError(
            f"{name}: shape {tuple(ids.shape)}, {ids.dtype}; expected expert ids [T, K] of an integer dtype"
        )
    if not 1 <= ids.shape[1] <= num_experts:
        raise RoutesError(f"{name}: {ids.shape[1]} experts a row; expected 1 to num_experts={num_experts}")


def class_of_rows(
    replayed: NarrowIds, valid_T: Tensor | None, sequence_starts: SequenceStarts | None, row_stride: int
) -> Tensor:
    """Return int8 `[T]`, the `RowClass` of each row; arguments as those of `classify_rows`."""
    ids_KT = replayed.ids_KT
    num_rows, device = ids_KT.shape[1], ids_KT.device
    starts_T = None if sequence_starts is None else starts_mask(sequence_starts, num_rows, device)
    if valid_T is not None:
        _check_mask(valid_T, num_rows)
    copies_T = _equals_previous(ids_KT, row_stride, starts_T, valid_T)
    least_T, most_T = ids_KT.amin(0), ids_KT.amax(0)
    classes_T = RowClass.CHECKED.value - copies_T.to(torch.int8)
    classes_T.masked_fill_(has_repeats(replayed), RowClass.REPEATED.value)
    classes_T.masked_fill_(most_T > replayed.num_experts, RowClass.OUT_OF_RANGE.value)
    classes_T.masked_fill_(least_T == 0, RowClass.MALFORMED.value)
    classes_T.masked_fill_(most_T == 0, RowClass.MISSING.value)
    if valid_T is None:
        return classes_T
    return torch.where(
        valid_T, classes_T, RowClass.PADDING.value - (classes_T != RowClass.MISSING.value).to(torch.int8)
    )


def _check_mask(valid_T: Tensor, num_rows: int) -> None:
    if valid_T.shape != (num_rows,) or valid_T.dtype != torch.bool:
        raise MaskError(
            f"valid has shape {tuple(valid_T.shape)}, {valid_T.dtype}; expected ({num_rows},), torch.bool: "
            "True on real tokens, one per row"
        )


def _equals_previous(ids_KT: Tensor, row_stride: int, starts_T: Tensor | None, valid_T: Tensor | None) -> Tensor:
    if row_stride < 1:
        raise RoutesError(f"row_stride={row_stride}; expected 1 or more")
    num_rows = ids_KT.shape[1]
    if num_rows <= row_stride:
        return torch.zeros(num_rows, dtype=torch.bool, device=ids_KT.device)
    equal = (ids_KT[:, row_stride:] ^ ids_KT[:, :-row_stride]).amax(0) == 0
    if starts_T is not None:
        equal &= ~starts_T[row_stride:]
    if valid_T is not None:
        equal &= valid_T[:-row_stride]
    return F.pad(equal, (row_stride, 0))


def equal_run_lengths(classes_T: Tensor, row_stride: int = 1) -> Tensor:
    """Return int64 `[T]`: how many equal real rows end at each row in token order, 0 where a row is not real."""
    num_rows = len(classes_T)
    steps = -(-num_rows // row_stride)
    # one column per step of the stride: running maxima down a column follow one sequence after another
    copies = F.pad(classes_T == RowClass.PLACEHOLDER.value, (0, steps * row_stride - num_rows)).view(steps, row_stride)
    step = torch.arange(steps, device=classes_T.device)[:, None].expand(steps, row_stride)
    first = step.masked_fill(copies, 0).cummax(0).values
    lengths_T = (step - first + 1).reshape(-1)[:num_rows]
    return lengths_T * usable_rows(classes_T)

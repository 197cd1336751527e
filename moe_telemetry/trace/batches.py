"""What the columns and the rows of a part have to be, whoever wrote it: checked before anything is counted."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from moe_telemetry.errors import TraceError
from moe_telemetry.trace.format import schema_for

__all__ = ["check_columns", "check_rows"]

_Fits = Callable[[pa.DataType], bool]


def check_columns(found: pa.Schema, source: str) -> None:
    """Check that a part has all columns of a trace; other widths of numbers and other forms of text and lists will do.

    Raises:
        TraceError: one is missing, or is of another kind.
    """
    for expected in schema_for(1):
        if expected.name not in found.names:
            raise TraceError(f"{source} has no column {expected.name!r}; expected a part of a route trace")
        kind = found.field(expected.name).type
        is_absent = expected.nullable and pa.types.is_null(kind)
        if not (is_absent or _alike(kind, expected.type)):
            raise TraceError(f"{source}: column {expected.name!r} is of {kind}; expected {expected.type}")


def check_rows(batch: pa.RecordBatch, source: str) -> None:
    """Check that rows fit themselves, as far as their columns are in the batch.

    Raises:
        TraceError: a value is null, `top_k` does not cut `expert_ids` into tokens, or a mask is of another length.
    """
    names = batch.schema.names
    for field in schema_for(1):
        if field.name in names and not _is_whole(batch.column(field.name), nullable=field.nullable):
            raise TraceError(f"{source} has a null in column {field.name!r}; expected a part of a route trace")
    if "top_k" not in names:
        return
    top_k = batch.column("top_k")
    if _any(pc.less(top_k, 1)):
        raise TraceError(f"{source} has a row with top_k below 1; capture it again")
    if "expert_ids" in names:
        _check_ids(batch, top_k, source)


def _check_ids(batch: pa.RecordBatch, top_k: pa.Array, source: str) -> None:
    num_ids = pc.list_value_length(batch.column("expert_ids"))
    rows = pc.divide(num_ids, top_k)
    if _any(pc.not_equal(pc.multiply(rows, top_k), num_ids)):
        raise TraceError(f"{source} has a row with expert_ids that are not top_k a token; capture it again")
    valid = batch.column("valid") if "valid" in batch.schema.names else None
    is_given = valid is not None and valid.null_count < len(valid)
    if is_given and _any(pc.not_equal(pc.list_value_length(valid), rows)):
        raise TraceError(f"{source} has a row with a mask of another length than its tokens; capture it again")
    if "num_tokens" in batch.schema.names and _any(pc.less(batch.column("num_tokens"), rows)):
        raise TraceError(f"{source} has a row with fewer num_tokens than tokens; capture it again")


def _is_whole(column: pa.Array, *, nullable: bool) -> bool:
    is_list = _is_list(column.type)
    return (nullable or not column.null_count) and not (is_list and column.flatten().null_count)


def _any(flags: pa.BooleanArray) -> bool:
    return bool(pc.any(flags).as_py())


def _alike(found: pa.DataType, expected: pa.DataType) -> bool:
    if _is_list(expected):
        return _is_list(found) and _alike(found.value_type, expected.value_type)
    if pa.types.is_dictionary(found):
        return _alike(found.value_type, expected)
    kinds: tuple[_Fits, ...] = (pa.types.is_signed_integer, pa.types.is_boolean, _is_text)
    return any(fits(expected) and fits(found) for fits in kinds)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))

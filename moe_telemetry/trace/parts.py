"""Parts: rows and tensors as files that are whole or absent.

Letters: N rows that were kept of a call's tokens, K experts chosen per token (top-k), E experts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from moe_telemetry.trace.calls import TracedCall
from moe_telemetry.trace.format import PARQUET_OPTIONS, part_name, tensors_name
from moe_telemetry.trace.rows import TraceRow

__all__ = ["row_of", "table_of", "whole_file", "write_part"]


def row_of(call: TracedCall, *, step: int, rank: int) -> TraceRow:
    """Return the row of a call whose tensors have arrived."""
    ids_NK = call.ids_NK.numpy()
    chosen_NK = ids_NK.astype(_id_type(call.num_experts))
    chosen_NK[(ids_NK >= call.num_experts) | (ids_NK < 0)] = -1
    length = call.num_tokens // call.num_sequences
    starts_B = np.arange(call.num_sequences, dtype=np.int32) * length
    return TraceRow(
        step=step,
        microbatch=call.microbatch,
        stage=call.stage,
        key=call.key,
        rank=rank,
        num_tokens=call.num_tokens,
        top_k=ids_NK.shape[1],
        is_sorted=call.is_sorted,
        expert_ids=chosen_NK,
        valid=None if call.valid_N is None else call.valid_N.numpy(),
        sequence_starts=starts_B[starts_B < len(ids_NK)],
    )


def table_of(rows: Sequence[TraceRow], schema: pa.Schema) -> pa.Table:
    """Return rows as a table of the trace's columns."""
    columns: dict[str, Any] = {
        "step": [row.step for row in rows],
        "microbatch": [row.microbatch for row in rows],
        "stage": [row.stage for row in rows],
        "block": [row.key.block for row in rows],
        "layer": [row.key.layer for row in rows],
        "rank": [row.rank for row in rows],
        "num_tokens": [row.num_tokens for row in rows],
        "top_k": [row.top_k for row in rows],
        "is_sorted": [row.is_sorted for row in rows],
        "expert_ids": _lists([row.expert_ids.reshape(-1) for row in rows], schema.field("expert_ids").type),
        "valid": _lists([row.valid for row in rows], schema.field("valid").type),
        "sequence_starts": _lists([row.sequence_starts for row in rows], schema.field("sequence_starts").type),
    }
    return pa.table(columns, schema=schema)


def write_part(
    folder: Path, rank: int, number: int, rows: Sequence[TraceRow], tensors: Mapping[str, Tensor], schema: pa.Schema
) -> int:
    """Write one part, its tensors before its rows, and return its bytes.

    Raises:
        OSError: the disk does not take it; nothing of the part is left then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = 0
    beside = folder / tensors_name(rank, number)
    if tensors:
        with whole_file(beside) as path:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        size += beside.stat().st_size
    try:
        with whole_file(folder / part_name(rank, number)) as path:
            pq.write_table(table_of(rows, schema), path, **PARQUET_OPTIONS)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return size + (folder / part_name(rank, number)).stat().st_size


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path to write to; what is there in the end takes the place of `path`, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.touch()
    mode = partial.stat().st_mode  # as the process makes files; safetensors makes them for the owner alone
    try:
        yield partial
        partial.chmod(mode)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _id_type(num_experts: int) -> type[np.signedinteger[Any]]:
    return np.int8 if num_experts <= 2**7 else np.int16 if num_experts <= 2**15 else np.int32


def _lists(values: Sequence[NDArray[Any] | None], kind: pa.ListType) -> pa.ListArray:
    """Return one list a row, null where it is None."""
    lengths = [0 if value is None else len(value) for value in values]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    present = [value for value in values if value is not None]
    flat = np.concatenate(present) if present else np.empty(0, np.int8)
    mask = pa.array([value is None for value in values], pa.bool_())
    items = pa.array(flat.astype(kind.value_type.to_pandas_dtype(), copy=False), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), items, type=kind, mask=mask)

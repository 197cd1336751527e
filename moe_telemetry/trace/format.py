"""The Parquet files of a route trace: one row a router call, in parts that are whole or absent.

    trace/
      manifest-00000.json                    what rank 0 captured, and how
      routes-00000-000000.parquet            rank 0, part 0
      tensors-00000-000000.safetensors       scores, hidden states ... of the calls of the same part

A part is written under another name and renamed when it is whole, so that a killed run leaves all parts but
the one being written. Expert ids are flat, `top_k` a token: `np.reshape(row["expert_ids"], (-1, row["top_k"]))`.
They are signed, the narrowest type that holds E - 1, and a choice that was not made is -1. As bytes of their
own planes (BYTE_STREAM_SPLIT) they take as little as one blob would, and pandas, polars and DuckDB read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pyarrow as pa

from moe_telemetry.identity import RouterKey

__all__ = ["PARQUET_OPTIONS", "part_name", "schema_for", "tensor_name", "tensors_name"]

PARQUET_OPTIONS: Mapping[str, object] = MappingProxyType(
    {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": ["stage", "block"],
        "column_encoding": {"expert_ids.list.element": "BYTE_STREAM_SPLIT"},
    }
)
"""How `pyarrow.parquet` writes a part."""


def schema_for(num_experts: int) -> pa.Schema:
    """Return the columns of a trace whose largest router has `num_experts` experts."""
    ids = pa.int8() if num_experts <= 2**7 else pa.int16() if num_experts <= 2**15 else pa.int32()
    return pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("microbatch", pa.int32(), nullable=False),  # the router's call within the step, from 0
            pa.field("stage", pa.string(), nullable=False),
            pa.field("block", pa.string(), nullable=False),
            pa.field("layer", pa.int32(), nullable=False),
            pa.field("rank", pa.int32(), nullable=False),
            pa.field("num_tokens", pa.int32(), nullable=False),  # of the call; more than rows where truncated
            pa.field("top_k", pa.int16(), nullable=False),
            pa.field("is_sorted", pa.bool_(), nullable=False),  # ids ascend: they come from a map, without order
            pa.field("expert_ids", pa.list_(pa.field("element", ids, nullable=False)), nullable=False),  # rows * top_k
            pa.field("valid", pa.list_(pa.field("element", pa.bool_(), nullable=False))),  # a row each; null: all real
            pa.field("sequence_starts", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        ]
    )


def part_name(rank: int, part: int) -> str:
    """Return the name of a Parquet part within the trace's folder."""
    return f"routes-{rank:05d}-{part:06d}.parquet"


def tensors_name(rank: int, part: int) -> str:
    """Return the name of the safetensors file that belongs to a part."""
    return f"tensors-{rank:05d}-{part:06d}.safetensors"


def tensor_name(what: str, step: int, microbatch: int, key: RouterKey) -> str:
    """Return the name of a call's tensor in the safetensors file, as in `scores/10/0/decoder.3`.

    `what` is one of `TENSORS` or `expert_bias`, which comes with `router_weights`. Shapes: scores `[rows, E]`,
    hidden_states `[rows, H]` (the router's input), router_weights `[E, H]`, expert_bias `[E]`, diagnostics
    `[B, 7, E]` of `build_router_diagnostics`; dtypes as the model has them. `router_weights` and `expert_bias`
    are there once a step, with microbatch 0.
    """
    return f"{what}/{step}/{microbatch}/{key}"

"""Traces with given routes and tensors, for tests of what is counted in them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.format import PARQUET_OPTIONS, part_name, schema_for, tensors_name
from moe_telemetry.trace.manifest import Manifest, TracedRouter, manifest_name

DECODER = RouterKey("decoder", 0)

Call = Mapping[str, Any]


def call(ids: Any, key: RouterKey = DECODER, **fields: Any) -> Call:
    """Return the row of one router call, whose ids are `[T, K]`."""
    ids_TK = np.array(ids)
    return {
        "step": 0,
        "microbatch": 0,
        "stage": "train",
        "block": key.block,
        "layer": key.layer,
        "rank": 0,
        "num_tokens": len(ids_TK),
        "top_k": ids_TK.shape[1],
        "is_sorted": False,
        "expert_ids": ids_TK.ravel(),
        "valid": None,
        "sequence_starts": [0],
        **fields,
    }


def write_trace(
    folder: str | os.PathLike[str],
    calls: Sequence[Call],
    *,
    num_experts: int = 8,
    tensors: Mapping[str, Any] | None = None,
    score_function: str = "softmax",
    is_biased: bool = False,
    keys: Sequence[RouterKey] | None = None,
    calls_per_part: int = 1000,
) -> Path:
    """Write the trace of one rank."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    known = keys or list(dict.fromkeys(RouterKey(each["block"], each["layer"]) for each in calls))
    routers = tuple(
        TracedRouter(key=key, num_experts=num_experts, score_function=score_function, is_biased=is_biased)
        for key in known
    )
    manifest = Manifest(
        run="run-1",
        model="Model",
        rank=0,
        world_size=1,
        token_group=0,
        routers=routers,
        tensors=("hidden_states", "router_weights") if tensors else (),
        is_complete=True,
    )
    (path / manifest_name(0)).write_text(manifest.to_json())
    for number, first in enumerate(range(0, len(calls), calls_per_part)):
        table = pa.Table.from_pylist(
            [dict(each) for each in calls[first : first + calls_per_part]], schema_for(num_experts)
        )
        pq.write_table(table, path / part_name(0, number), **PARQUET_OPTIONS)
        if tensors and number == 0:
            save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path / tensors_name(0, 0))
    return path

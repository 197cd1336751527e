"""Synthetic route traces of any size, the same every time, for tests of what reads them.

make_trace(tmp_path / "trace", num_steps=4, num_layers=3, num_experts=16, top_k=2)

Letters: T tokens, K experts chosen per token (top-k), E experts, H width of hidden states.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.numpy import save

from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.format import PARQUET_OPTIONS, part_name, schema_for, tensor_name, tensors_name
from moe_telemetry.trace.manifest import LeftOut, Manifest, TracedRouter, manifest_name

__all__ = ["make_trace"]

_POOL_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class _Plan:
    keys: tuple[RouterKey, ...]
    num_steps: int
    first_step: int
    step_stride: int
    num_microbatches: int
    num_experts: int
    top_k: int
    num_tokens: int
    num_sequences: int
    num_padding: int
    stage: str
    hidden_size: int | None
    is_biased: bool
    steps_per_part: int
    steps_per_row_group: int
    seed: int

    @property
    def steps(self) -> range:
        return range(self.first_step, self.first_step + self.num_steps * self.step_stride, self.step_stride)


def make_trace(
    folder: str | os.PathLike[str],
    *,
    num_steps: int = 4,
    num_layers: int = 3,
    num_experts: int = 16,
    top_k: int = 2,
    num_tokens: int = 64,
    num_sequences: int = 4,
    num_padding: int = 0,
    num_microbatches: int = 1,
    token_groups: Sequence[int] = (0,),
    keys: Sequence[RouterKey] | None = None,
    stage: str = "train",
    hidden_size: int | None = None,
    is_biased: bool = False,
    score_function: str = "softmax",
    first_step: int = 0,
    step_stride: int = 1,
    steps_per_part: int = 2,
    steps_per_row_group: int = 1,
    run: str = "run-1",
    seed: int = 0,
    is_complete: bool = True,
    left_out: LeftOut | None = None,
) -> str:
    """Write a trace to `folder`, a path or a URL of fsspec, and return it.

    Experts are chosen unevenly. With `hidden_size` the trace holds hidden states, router weights (and an expert
    bias where `is_biased`), and its routes are the top-k of their products. The tokens of a call are cut into
    `num_sequences` sequences of about equal length, and the last `num_padding` of them are padding. `token_groups`
    are those of the ranks: `(0, 0)` are two ranks with the same tokens.
    """
    plan = _Plan(
        keys=tuple(keys or (RouterKey("decoder", layer) for layer in range(num_layers))),
        num_steps=num_steps,
        first_step=first_step,
        step_stride=step_stride,
        num_microbatches=num_microbatches,
        num_experts=num_experts,
        top_k=top_k,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_padding=num_padding,
        stage=stage,
        hidden_size=hidden_size,
        is_biased=is_biased,
        steps_per_part=steps_per_part,
        steps_per_row_group=steps_per_row_group,
        seed=seed,
    )
    filesystem, root = fsspec.core.url_to_fs(os.fspath(folder))
    filesystem.makedirs(root, exist_ok=True)
    routers = tuple(
        TracedRouter(key=key, num_experts=num_experts, top_k=top_k, score_function=score_function, is_biased=is_biased)
        for key in plan.keys
    )
    for rank, group in enumerate(token_groups):
        manifest = Manifest(
            run=run,
            model="TinyMoe",
            rank=rank,
            world_size=len(token_groups),
            token_group=group,
            routers=routers,
            tensors=("hidden_states", "router_weights") if hidden_size else (),
            is_complete=is_complete,
            left_out=left_out or LeftOut(),
        )
        filesystem.pipe_file(f"{root}/{manifest_name(rank)}", manifest.to_json().encode())
        _write_parts(filesystem, root, plan, rank, group)
    return os.fspath(folder)


def _write_parts(filesystem: fsspec.AbstractFileSystem, root: str, plan: _Plan, rank: int, group: int) -> None:
    for part, first in enumerate(range(0, plan.num_steps, plan.steps_per_part)):
        steps = plan.steps[first : first + plan.steps_per_part]
        tensors: dict[str, NDArray[Any]] = {}
        with (
            filesystem.open(f"{root}/{part_name(rank, part)}", "wb") as file,
            pq.ParquetWriter(file, schema_for(plan.num_experts), **PARQUET_OPTIONS) as writer,
        ):
            for start in range(0, len(steps), plan.steps_per_row_group):
                rows = [
                    row
                    for step in steps[start : start + plan.steps_per_row_group]
                    for row in _rows_of_step(plan, rank, group, step, tensors)
                ]
                writer.write_table(pa.Table.from_pylist(rows, schema=writer.schema))
        if plan.hidden_size:
            filesystem.pipe_file(f"{root}/{tensors_name(rank, part)}", save(tensors))


def _rows_of_step(
    plan: _Plan, rank: int, group: int, step: int, tensors: dict[str, NDArray[Any]]
) -> Iterator[dict[str, Any]]:
    starts = sorted({plan.num_tokens * index // plan.num_sequences for index in range(plan.num_sequences)})
    num_real = plan.num_tokens - plan.num_padding
    for microbatch in range(plan.num_microbatches):
        # ranks of one token group hold the same tokens
        chance = np.random.default_rng([plan.seed, group, step % 2**64, microbatch])
        if plan.hidden_size:
            layers = _routed_by_products(plan, chance, step, microbatch, tensors)
        else:
            layers = _routed_by_chance(plan, chance)
        for key, ids_TK in layers:
            yield {
                "step": step,
                "microbatch": microbatch,
                "stage": plan.stage,
                "block": key.block,
                "layer": key.layer,
                "rank": rank,
                "num_tokens": plan.num_tokens,
                "top_k": plan.top_k,
                "is_sorted": False,
                "expert_ids": ids_TK.ravel(),
                "valid": np.arange(plan.num_tokens) < num_real if plan.num_padding else None,
                "sequence_starts": starts,
            }


def _routed_by_chance(plan: _Plan, chance: np.random.Generator) -> Iterator[tuple[RouterKey, NDArray[np.int32]]]:
    for index, key in enumerate(plan.keys):
        pool = _pool(plan.num_experts, plan.top_k, index, plan.seed)
        yield key, pool[chance.integers(_POOL_ROWS, size=plan.num_tokens)]


@lru_cache(maxsize=128)
def _pool(num_experts: int, top_k: int, layer: int, seed: int) -> NDArray[np.int32]:
    """Return rows of distinct experts, some experts far more often than others."""
    chance = np.random.default_rng([seed, layer])
    scores = chance.gumbel(size=(_POOL_ROWS, num_experts)) + chance.normal(0, 1.5, num_experts)
    return np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)


def _routed_by_products(
    plan: _Plan, chance: np.random.Generator, step: int, microbatch: int, tensors: dict[str, NDArray[Any]]
) -> Iterator[tuple[RouterKey, NDArray[np.int32]]]:
    assert plan.hidden_size is not None  # noqa: S101  # the caller asked
    hidden_TH = chance.normal(size=(plan.num_tokens, plan.hidden_size)).astype(np.float32)
    for index, key in enumerate(plan.keys):
        weights = np.random.default_rng([plan.seed, index, 1])
        weight_EH = weights.normal(size=(plan.num_experts, plan.hidden_size)).astype(np.float32)
        bias_E = weights.normal(0, 0.1, plan.num_experts).astype(np.float32)
        # the residual stream: a layer's input is mostly the input of the layer before
        hidden_TH = hidden_TH + np.float32(0.3) * chance.normal(size=hidden_TH.shape).astype(np.float32)
        tensors[tensor_name("hidden_states", step, microbatch, key)] = hidden_TH
        if microbatch == 0:
            tensors[tensor_name("router_weights", step, 0, key)] = weight_EH
            if plan.is_biased:
                tensors[tensor_name("expert_bias", step, 0, key)] = bias_E
        logits_TE = hidden_TH.astype(np.float64) @ weight_EH.astype(np.float64).T
        choice_TE = _softmax(logits_TE) + bias_E if plan.is_biased else logits_TE
        yield key, np.argsort(-choice_TE, axis=1, kind="stable")[:, : plan.top_k].astype(np.int32)


def _softmax(logits_TE: NDArray[np.float64]) -> NDArray[np.float64]:
    powers_TE = np.exp(logits_TE - logits_TE.max(1, keepdims=True))
    return np.asarray(powers_TE / powers_TE.sum(1, keepdims=True))

"""Several ranks trace into one folder: each its own files, all of one trace."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import torch

import moe_telemetry as mt
from moe_telemetry.testing.models import TinyMoe
from moe_telemetry.testing.ranks import run_ranks
from moe_telemetry.trace.manifest import Manifest


def _trace_twice(rank: int, folder: str) -> list[str]:
    hidden = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(7))
    model = TinyMoe()
    # tensor parallel: both ranks see the same 4 tokens
    with mt.watch(model, routers=model.routers, run="tp", token_replicas=[0, 1]) as monitor:
        with monitor.trace(Path(folder, "tensor")):
            model(hidden)
            monitor.step(5)
    # pipeline: each rank owns one layer, and a rank may have none of them traced
    spec = {0: mt.RouterSpec(num_experts=8, top_k=2), 1: mt.RouterSpec(num_experts=300, score_function="sigmoid")}
    with mt.watch(model, routers={f"decoder.{rank}": spec[rank]}, run="pp") as monitor:
        with monitor.trace(Path(folder, "pipeline"), max_steps=1) as trace:
            monitor.observe(rank, [[rank, 7]])
            monitor.step(5)
            assert not trace.is_running
    return [str(key) for key in monitor.routers]


def _manifests(folder: Path) -> list[Manifest]:
    return [Manifest.from_json(path.read_text()) for path in sorted(folder.glob("manifest-*.json"))]


def test_ranks_write_one_trace_that_says_whose_tokens_count_and_names_all_routers(tmp_path: Path) -> None:
    assert run_ranks(_trace_twice, 2, str(tmp_path)) == [["decoder.0", "decoder.1"]] * 2
    tensor = _manifests(tmp_path / "tensor")
    assert [(each.rank, each.world_size, each.token_group) for each in tensor] == [(0, 2, 0), (1, 2, 0)]
    tables = [pq.read_table(tmp_path / "tensor" / f"routes-0000{rank}-000000.parquet") for rank in range(2)]
    assert tables[0].drop_columns("rank").equals(tables[1].drop_columns("rank"))
    # counted once: 4 tokens of each layer, and not 8
    counted = [table for table, each in zip(tables, tensor, strict=True) if each.token_group == each.rank]
    assert sum(sum(table["num_tokens"].to_pylist()) for table in counted) == 2 * 4
    pipeline = _manifests(tmp_path / "pipeline")
    assert [(each.rank, each.token_group, each.is_complete) for each in pipeline] == [(0, 0, True), (1, 1, True)]
    assert pipeline[0].topology == pipeline[1].topology
    assert [(str(each.key), each.num_experts, each.score_function) for each in pipeline[0].routers] == [
        ("decoder.0", 8, "softmax"),
        ("decoder.1", 300, "sigmoid"),
    ]
    rows = [pq.read_table(path) for path in sorted((tmp_path / "pipeline").glob("*.parquet"))]
    # one schema for all ranks, by the largest router of the job
    assert rows[0].schema == rows[1].schema
    assert [(row["layer"].to_pylist(), row["expert_ids"].to_pylist()) for row in rows] == [
        ([0], [[0, 7]]),
        ([1], [[1, 7]]),
    ]

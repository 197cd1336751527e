"""Traces of transformers models: the routes that `record` gives, and the routers' own tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import moe_telemetry as mt

if TYPE_CHECKING:
    from conftest import Family


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "dbrx", "jetmoe", "llama4", "nllb_moe"])
def test_a_trace_holds_what_the_router_chose(family_named: dict[str, Family], tmp_path: Path, name: str) -> None:
    family = family_named[name]
    model = family.build().eval()
    ids, mask = torch.arange(20).view(2, 10) % 64 + 3, torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, **family.inputs}
    if name == "nllb_moe":
        inputs |= {"decoder_input_ids": ids}
    weights = {"router_weights": True, "hidden_states": True}
    with mt.watch(model) as monitor, monitor.trace(tmp_path, **weights), torch.no_grad():  # type: ignore[arg-type]
        with monitor.record() as recording:
            model(**inputs)
        expected = recording._calls
    table = pq.read_table(tmp_path / "routes-00000-000000.parquet").to_pylist()
    tensors = load_file(tmp_path / "tensors-00000-000000.safetensors")
    assert [f"{row['block']}.{row['layer']}" for row in sorted(table, key=_order)] == family.keys.split()
    for row in table:
        key = mt.RouterKey(row["block"], row["layer"])
        ids_TK = torch.tensor(row["expert_ids"]).view(-1, row["top_k"])
        (recorded,) = expected[key]
        if row["valid"] is not None:
            ids_TK = ids_TK.masked_fill(~torch.tensor(row["valid"]).unsqueeze(1), -1)
        if row["is_sorted"]:
            # of a map, record() gives no order
            ids_TK, recorded = ids_TK.sort().values, recorded.sort().values
        assert torch.equal(ids_TK.int(), recorded)
        assert row["sequence_starts"] == [0, len(ids_TK) // 2]
        assert tensors[f"router_weights/1/0/{key}"].shape == (family.num_experts, 64)
        assert tensors[f"hidden_states/1/0/{key}"].shape == (len(ids_TK), 64)


def _order(row: dict[str, Any]) -> tuple[int, str, int, int]:
    return mt.RouterKey(row["block"], row["layer"]).order


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "dbrx"])
def test_the_input_and_the_weight_of_a_trace_make_the_models_own_choice(
    family_named: dict[str, Family], tmp_path: Path, name: str
) -> None:
    model = family_named[name].build().eval()
    with mt.watch(model) as monitor, monitor.trace(tmp_path, hidden_states=True, router_weights=True), torch.no_grad():
        model(input_ids=torch.arange(20).view(2, 10) % 64 + 3)
    tensors = load_file(tmp_path / "tensors-00000-000000.safetensors")
    for row in pq.read_table(tmp_path / "routes-00000-000000.parquet").to_pylist():
        place = f"1/0/{row['block']}.{row['layer']}"
        logits = tensors[f"hidden_states/{place}"] @ tensors[f"router_weights/{place}"].t()
        assert torch.tensor(row["expert_ids"]).view(-1, 2).tolist() == logits.topk(2).indices.tolist()

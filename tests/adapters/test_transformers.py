"""How the adapter finds and reads routers, on modules built like those of transformers."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from moe_telemetry.adapters.transformers import find_routers
from moe_telemetry.adapters.transformers_reads import (
    read_dense_scores,
    read_experts_input,
    read_kept_weights,
    read_one_hot,
    read_router_output,
    read_skip_expert,
)
from moe_telemetry.errors import ConfigError

if TYPE_CHECKING:
    from moe_telemetry.routers import ReadCall

IDS = torch.tensor([[1, 0], [3, 2], [5, 4]])
WEIGHTS = torch.full((3, 2), 0.5)
LOGITS = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class TinyRouter(nn.Module):
    """Returns (logits, weights, ids)."""

    def __init__(self, num_experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.weight = nn.Parameter(torch.randn(num_experts, 16))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        weights, ids = logits.softmax(-1).topk(self.top_k)
        return logits, weights, ids


class TinyExperts(nn.Module):
    """Called with the chosen ids; its own count is the local one of expert parallelism."""

    num_experts = 4

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states * top_k_weights.sum(-1, keepdim=True) + 0 * top_k_index.sum()


class TinyBlock(nn.Module):
    """Router and experts side by side."""

    def __init__(self, router: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = router or TinyRouter()
        self.experts = TinyExperts()

    def forward(self, hidden: Tensor) -> Tensor:
        _, weights, ids = self.gate(hidden)
        out: Tensor = self.experts(hidden, ids, weights)
        return out


class ChoosingBlock(TinyBlock):
    """Chooses from a logits-only router, as deepseek did in transformers before 5.18."""

    top_k = 2

    def route_tokens_to_experts(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = logits.topk(self.top_k)
        return ids, weights

    def forward(self, hidden: Tensor) -> Tensor:
        ids, weights = self.route_tokens_to_experts(self.gate(hidden))
        out: Tensor = self.experts(hidden, ids, top_k_weights=weights)
        return out


def stack(*blocks: nn.Module) -> nn.Module:
    """Return a model with `blocks` as its layers."""
    model = nn.Module()
    model.layers = nn.ModuleList()
    for block in blocks:
        layer = nn.Module()
        layer.mlp = block
        model.layers.append(layer)
    return model


def keys(model: nn.Module) -> list[str]:
    return [str(site.key) for site in find_routers(model)]


def test_dense_layers_keep_their_numbers() -> None:
    assert keys(stack(nn.Linear(16, 16), TinyBlock(), TinyBlock())) == ["decoder.1", "decoder.2"]


def test_routers_come_in_the_order_of_their_layers_as_numbers() -> None:
    assert keys(stack(*[TinyBlock() for _ in range(12)])) == [f"decoder.{layer}" for layer in range(12)]


def test_a_layer_list_alone_has_the_same_routers_as_its_model() -> None:
    model = stack(TinyBlock(), TinyBlock())
    assert [str(site.key) for site in find_routers(model.layers)] == keys(model)


def test_a_rebuilt_stage_is_numbered_by_its_layers_own_index() -> None:
    model = stack(TinyBlock(), TinyBlock())
    for index, layer in enumerate(model.layers, start=4):
        layer.self_attn = nn.Module()
        layer.self_attn.layer_idx = index
    assert keys(model) == ["decoder.4", "decoder.5"]


def test_the_compiled_model_has_the_same_keys() -> None:
    model = nn.Sequential(TinyBlock(), TinyBlock())
    assert keys(torch.compile(model, backend="eager")) == ["decoder.0", "decoder.1"]


@pytest.mark.parametrize("block", [TinyBlock(), ChoosingBlock(nn.Linear(16, 8))])
def test_wrapped_parts_of_a_block_are_found_once_and_hooked_inside(block: TinyBlock) -> None:
    block.gate, block.experts = (torch.compile(part, backend="eager") for part in (block.gate, block.experts))
    (site,) = find_routers(stack(block))
    assert str(site.key) == "decoder.0"
    assert site.name.endswith("._orig_mod")
    assert not isinstance(site.module, torch._dynamo.OptimizedModule)


def test_the_number_of_experts_is_the_routers_not_that_of_the_local_experts() -> None:
    (site,) = find_routers(stack(TinyBlock()))
    assert (site.num_experts, site.top_k) == (8, 2)


@pytest.mark.parametrize("block", [ChoosingBlock(nn.Linear(16, 8)), TinyBlock(nn.Linear(16, 8))])
def test_a_logits_only_router_is_read_at_the_input_of_the_experts(block: TinyBlock) -> None:
    (site,) = find_routers(stack(nn.Identity(), block))
    assert (str(site.key), site.name, site.hook) == ("decoder.1", "layers.1.mlp.experts", "input")
    assert site.module is block.experts
    assert site.num_experts == 8


def test_a_class_that_a_wrapper_derived_is_still_known() -> None:
    base = type("Llama4Router", (TinyRouter,), {})
    router = type("FSDPLlama4Router", (base,), {})()
    (site,) = find_routers(stack(router))
    assert site.read is read_dense_scores


def recording(target: type[nn.Module], layer_name: str | None = None) -> type[nn.Module]:
    """Return a model class that records `target` as its router, as transformers models do."""

    class Recording(nn.Module):
        _can_record_outputs: ClassVar[dict[str, Any]] = {
            "router_logits": SimpleNamespace(target_class=target, index=0, layer_name=layer_name)
        }

    return Recording


def test_a_recorded_router_without_experts_beside_it_is_found() -> None:
    model = recording(TinyRouter)()
    model.layers = nn.ModuleList([TinyRouter(), TinyRouter()])
    assert keys(model) == ["decoder.0", "decoder.1"]


def test_a_recorded_block_does_not_stand_in_for_the_router_inside_it() -> None:
    model = recording(TinyBlock)()
    model.layers = nn.ModuleList([TinyBlock()])
    (site,) = find_routers(model)
    assert site.name == "layers.0.gate"


def test_routers_that_cannot_be_read_are_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = recording(nn.Linear, "mlp.gate")()
    model.layers = nn.ModuleList()
    for _ in range(3):
        layer = nn.Module()
        layer.mlp = nn.ModuleDict({"gate": nn.Linear(16, 8), "up": nn.Linear(16, 16)})
        model.layers.append(layer)
    with caplog.at_level(logging.WARNING):
        assert find_routers(model) == []
    (record,) = caplog.records
    assert "3 routers (Linear, first at 'layers.0.mlp.gate')" in record.getMessage()
    assert "Monitor.observe" in record.getMessage()


def test_a_dense_model_has_no_router_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert find_routers(stack(nn.Linear(16, 16))) == []
    assert not caplog.records


@pytest.mark.parametrize(
    "output",
    [(LOGITS, WEIGHTS, IDS), (IDS, WEIGHTS, LOGITS), (LOGITS, IDS.int(), WEIGHTS), (WEIGHTS, IDS.byte(), LOGITS)],
)
def test_a_routers_output_is_read_in_any_order_of_any_release(output: tuple[Tensor, ...]) -> None:
    read = read_router_output((), {}, output)
    assert torch.equal(read.expert_ids, IDS)
    assert read.scores is LOGITS
    assert read.weights is WEIGHTS


def test_where_all_experts_are_chosen_the_logits_are_the_first_of_two() -> None:
    weights = torch.ones(3, 2)
    logits = torch.zeros(3, 2)
    read = read_router_output((), {}, (logits, weights, IDS % 2))
    assert read.scores is logits
    assert read.weights is weights


def test_an_output_without_ids_says_what_was_found() -> None:
    with pytest.raises(ConfigError, match=r"\(3, 8\) torch.float32"):
        read_router_output((), {}, LOGITS)


def test_the_input_of_experts_is_read_from_positions_and_keywords() -> None:
    by_place = read_experts_input((LOGITS, IDS, WEIGHTS), {}, None)
    by_name = read_experts_input((LOGITS,), {"top_k_index": IDS, "top_k_weights": WEIGHTS}, None)
    assert by_place.expert_ids is by_name.expert_ids is IDS
    assert by_place.weights is by_name.weights is WEIGHTS


def test_an_all_zero_row_of_a_one_hot_mask_is_a_dropped_token() -> None:
    mask = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    read = read_one_hot((), {}, (mask, torch.ones(3, 1), LOGITS[:, :3]))
    assert read.expert_ids.tolist() == [[2], [-1], [0]]


CALLS = {
    read_router_output: ((), (LOGITS, WEIGHTS, IDS)),
    read_experts_input: ((LOGITS, IDS, WEIGHTS), None),
    read_dense_scores: ((), (LOGITS.relu(), LOGITS)),
    read_one_hot: ((), (torch.eye(3, 8).long(), WEIGHTS[:, :1], LOGITS)),
    read_kept_weights: ((), (torch.eye(3, 8).long(), LOGITS.relu(), LOGITS)),
    read_skip_expert: ((), (LOGITS, WEIGHTS, IDS)),
}


@pytest.mark.parametrize("read", CALLS, ids=lambda read: read.__name__)
def test_reading_compiles_into_one_graph_and_reads_no_value(read: ReadCall) -> None:
    args, output = CALLS[read]
    compiled = torch.compile(read, fullgraph=True, backend="eager")(args, {}, output)
    for ours, plain in zip(compiled, read(args, {}, output), strict=True):
        assert ours is plain or torch.equal(ours, plain)
    on_meta = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, output))
    read(on_meta[0], {}, on_meta[1])


def test_all_layers_share_one_function_that_reads() -> None:
    assert len({site.read for site in find_routers(stack(TinyBlock(), TinyBlock(), TinyBlock()))}) == 1


def test_the_adapter_does_not_import_transformers() -> None:
    code = "import sys, moe_telemetry.adapters.transformers; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Keys of routers from module paths, and what looks like a router."""

from __future__ import annotations

import pytest
from torch import nn

from moe_telemetry.identity import RouterKey
from moe_telemetry.naming import looks_like_router, router_key, router_keys


def tree(*paths: str) -> nn.Module:
    """Return a module with a submodule at each path."""
    root = nn.Module()
    for path in paths:
        module = root
        for part in path.split("."):
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
    return root


def key_of(path: str) -> str:
    return str(router_key(tree(path), path))


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("model.layers.3.mlp.gate", "decoder.3"),
        ("layers.3.mlp.gate", "decoder.3"),
        ("model.language_model.layers.3.block_sparse_moe.router", "decoder.3"),
        ("transformer.h.3.ffn.experts", "decoder.3"),
        ("transformer.blocks.11.ffn.router", "decoder.11"),
        ("decoder.layers.0.mlp.router", "decoder.0"),
        ("encoder.block.1.layer.2.mlp.router", "encoder.1"),
        ("decoder.block.1.layer.2.mlp.router", "decoder.1"),
        ("model.encoder.layers.5.ffn.router", "encoder.5"),
        ("thinker.model.layers.2.mlp.gate", "decoder.2"),
        ("talker.model.layers.2.mlp.gate", "talker.2"),
        ("model.layers.1.mlp.text_moe.gate", "decoder.1"),
        ("model.layers.1.mlp.vision_moe.gate", "vision_moe.1"),
        ("model.visual.blocks.4.mlp.gate", "visual.4"),
        ("model.layers.1.self_attention.experts.router", "self_attention.1"),
        ("net.trunk.stack.7.my_moe.chooser", "decoder.7"),
        ("gate", "decoder.0"),
    ],
)
def test_a_module_path_gives_the_key_that_people_know(path: str, key: str) -> None:
    assert key_of(path) == key


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("mtp.layers.0.mlp.gate", "mtp0.0"),
        ("model.mtp.layers.1.transformer_layer.mlp.router", "mtp1.0"),
        ("mtp.layers.1.mtp_model_layer.layers.2.mlp.router", "mtp1.2"),
        ("model.mtp_layers.0.mlp.gate", "mtp0.0"),
        ("mtp2.layers.1.mlp.gate", "mtp2.1"),
        ("nextn.mlp.gate", "mtp0.0"),
    ],
)
def test_a_multi_token_prediction_router_is_never_a_decoder_layer(path: str, key: str) -> None:
    assert key_of(path) == key


@pytest.mark.parametrize(
    "path",
    [
        "_orig_mod.model.layers.4.mlp.gate",
        "module.model.layers.4._checkpoint_wrapped_module.mlp.gate",
        "_fsdp_wrapped_module.model.layers.4._fsdp_wrapped_module._orig_mod.mlp._fsdp_wrapped_module.gate",
    ],
)
def test_wrappers_leave_no_trace_in_the_key(path: str) -> None:
    assert key_of(path) == "decoder.4"


@pytest.mark.parametrize("owner", ["layers.0", "layers.0.self_attn", "layers.0._orig_mod.self_attn"])
def test_a_renumbered_pipeline_stage_keeps_the_layers_own_index(owner: str) -> None:
    model = tree("layers.0._orig_mod.mlp.gate", owner)
    model.get_submodule(owner).layer_idx = 4
    assert router_key(model, "layers.0._orig_mod.mlp.gate") == RouterKey("decoder", 4)


def test_children_that_disagree_about_the_layers_index_are_not_believed() -> None:
    model = tree("layers.1.mlp.gate", "layers.1.self_attn", "layers.1.mamba")
    model.get_submodule("layers.1.self_attn").layer_idx = 4
    model.get_submodule("layers.1.mamba").layer_idx = 7
    assert router_key(model, "layers.1.mlp.gate") == RouterKey("decoder", 1)


def test_layers_that_would_share_keys_are_told_apart_by_their_paths() -> None:
    names = ["a.layers.0.gate", "b.layers.0.gate", "stages.0.blocks.1.gate", "stages.1.blocks.1.gate"]
    keys = router_keys(tree(*names), names)
    assert [str(key) for key in keys] == ["a.0", "b.0", "stages0.1", "stages1.1"]


def test_a_layer_without_a_twin_is_in_the_block_of_its_stack_mates() -> None:
    names = ["model.layers.0.moe_a.gate", "model.layers.1.moe_a.gate", "model.layers.1.moe_b.gate"]
    keys = router_keys(tree(*names), names)
    assert [str(key) for key in keys] == ["moe_a.0", "moe_a.1", "moe_b.1"]


def test_keys_order_layers_as_numbers() -> None:
    names = [f"model.layers.{layer}.mlp.gate" for layer in (10, 2, 1)]
    ordered = sorted(router_keys(tree(*names), names), key=lambda key: key.order)
    assert [key.layer for key in ordered] == [1, 2, 10]


class OddRouter(nn.Module):
    """A router by its class's name alone, with its weight one level down."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 4)


@pytest.mark.parametrize(
    ("name", "module", "looks"),
    [
        ("layers.0.gate", nn.Linear(16, 4), True),
        ("layers.0.chooser", OddRouter(), True),
        ("layers.0.gate_proj", nn.Linear(16, 4), False),
        ("layers.0.gate", nn.Linear(16, 64), False),
        ("layers.0.shared_expert.gate", nn.Linear(16, 1), False),
        ("layers.0.gate", nn.Identity(), False),
    ],
)
def test_a_router_is_recognised_by_name_and_shape(name: str, module: nn.Module, looks: bool) -> None:
    assert looks_like_router(name, module) is looks

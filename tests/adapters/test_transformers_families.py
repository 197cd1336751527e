"""Every family of transformers with routers: what is found, and that it reads what was dispatched."""

# hooks take and give anything

from __future__ import annotations

import importlib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from moe_telemetry.adapters.transformers import find_routers
from moe_telemetry.diagnostics import as_probabilities

if TYPE_CHECKING:
    from torch import Tensor, nn

    from moe_telemetry.routers import RouterOutput


def run_and_read(family: Any, model: nn.Module) -> tuple[dict[str, RouterOutput], dict[str, Any]]:
    """Run `model`; return what each router was read to choose, and each module's raw call, by name."""
    read: dict[str, RouterOutput] = {}
    calls: dict[str, Any] = defaultdict(list)
    for site in find_routers(model):

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any = None, *, site: Any = site) -> None:
            assert str(site.key) not in read, "one forward, one call"
            read[str(site.key)] = site.read(args, kwargs, output)

        if site.hook == "input":
            site.module.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            site.module.register_forward_hook(hook, with_kwargs=True)
    for name, module in model.named_modules():

        def keep(_: nn.Module, args: Any, kwargs: Any, output: Any, *, name: str = name) -> None:
            calls[name] = [(*args, *kwargs.values()), output]

        module.register_forward_hook(keep, with_kwargs=True)
    family.run(model)
    return read, calls


def chosen(logits_TE: Tensor, top_k: int) -> Tensor:
    """Return 0 / 1 [T, E] of the largest."""
    return torch.zeros_like(logits_TE).scatter_(-1, logits_TE.topk(top_k, dim=-1).indices, 1).long()


def as_map(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return counts [T, E] of ids; those below zero count nowhere."""
    return torch.nn.functional.one_hot(ids_TK + 1, num_experts + 1).sum(-2)[..., 1:]


def check_scores(family: Any, site: Any, output: RouterOutput) -> None:
    """Check what a site says of its scores: they give the weights, and the choice where nothing else decides."""
    chances_TE = as_probabilities(output.scores, kind=site.score_kind, function=site.score_function)
    assert site.score_kind != "auto"
    if not site.is_biased:
        assert torch.equal(as_map(output.expert_ids, family.num_experts), chosen(chances_TE, family.top_k))
    if family.name != "phimoe":  # its weights are of scores that are masked anew for each choice
        ours_TK, own_TK = chances_TE.gather(1, output.expert_ids), output.weights.float()
        torch.testing.assert_close(ours_TK / ours_TK.sum(1, keepdim=True), own_TK / own_TK.sum(1, keepdim=True))


def find_as_stated(family: Any, model: nn.Module) -> dict[str, Any]:
    """Return the sites of `model` by key, after checking them against the family's entry."""
    sites = find_routers(model)
    assert [str(site.key) for site in sites] == family.keys.split()
    assert {(site.num_experts, site.top_k) for site in sites} == {(family.num_experts, family.top_k)}
    assert all(model.get_submodule(site.name) is site.module for site in sites)
    return {str(site.key): site for site in sites}


def test_every_router_is_found_and_reads_what_its_experts_receive(family: Any) -> None:
    model = family.build()
    sites = find_as_stated(family, model)
    kept = [name for name, _ in [*model.named_buffers(), *model.named_parameters()]]
    has_bias = any(name.endswith(("score_correction_bias", "expert_bias")) for name in kept)
    assert any(site.expert_bias() is not None for site in sites.values()) == has_bias
    read, calls = run_and_read(family, model)
    assert set(read) == set(sites)
    for key, output in read.items():
        block = sites[key].name.rpartition(".")[0]
        received, _ = calls[f"{block}.experts" if block else "experts"]
        assert torch.equal(output.expert_ids, received[1])
        assert torch.equal(output.weights.to(received[2].dtype), received[2])
        if sites[key].hook == "output":
            assert output.scores.shape == (len(output.expert_ids), family.num_experts)
            check_scores(family, sites[key], output)


def test_the_selection_differs_from_the_top_logits_where_a_bias_or_groups_rule(family_named: Any) -> None:
    family = family_named["deepseek_v3"]
    read, _ = run_and_read(family, family.build())
    for output in read.values():
        ours = as_map(output.expert_ids, family.num_experts)
        assert not torch.equal(ours, chosen(output.scores, family.top_k))


def test_a_router_that_leaves_the_choice_to_its_block_is_read_at_the_experts(family_named: Any) -> None:
    sites = find_routers(family_named["dbrx"].build())
    assert {site.hook for site in sites} == {"input"}
    assert {type(site.module).__name__ for site in sites} == {"DbrxExperts"}


def test_dense_scores_are_read_as_a_map_of_the_experts_above_zero(family_named: Any) -> None:
    family = family_named["llama4"]
    model = family.build()
    sites = find_as_stated(family, model)
    read, calls = run_and_read(family, model)
    for key, output in read.items():
        _, (scores, logits) = calls[sites[key].name]
        assert torch.equal(output.routing_map.long(), chosen(logits, 2))
        assert torch.equal(output.scores, logits)
        assert torch.equal(scores > 0, output.routing_map)


def test_choices_sorted_by_expert_are_put_back_in_token_order(family_named: Any) -> None:
    family = family_named["jetmoe"]
    model = family.build()
    find_as_stated(family, model)
    read, _ = run_and_read(family, model)
    for output in read.values():
        assert torch.equal(output.expert_ids, output.scores.topk(2, dim=-1).indices)


def test_product_keys_are_read_where_the_experts_are_looked_up(family_named: Any) -> None:
    family = family_named["doge"]
    model = family.build()
    sites = find_as_stated(family, model)
    read, calls = run_and_read(family, model)
    for key, output in read.items():
        _, (_, logits) = calls[sites[key].name.rpartition(".")[0]]
        all_pairs = (logits[0].unsqueeze(-1) + logits[1].unsqueeze(-2)).flatten(-2)
        assert torch.equal(as_map(output.expert_ids, 9), chosen(all_pairs, 2))


def test_a_token_over_capacity_has_a_negative_id(family_named: Any) -> None:
    family = family_named["switch_transformers"]
    model = family.build()
    sites = find_as_stated(family, model)
    assert all(site.negative_ids_are_dropped for site in sites.values())
    read, calls = run_and_read(family, model)
    for key, output in read.items():
        received, _ = calls[sites[key].name.replace("router", "experts")]
        kept = as_map(output.expert_ids, 8)
        assert torch.equal(kept.view(-1, 1, 8), received[1])
        assert kept.sum(-2).max() == 3
    assert sum(int((output.expert_ids < 0).sum()) for output in read.values()) > 0


def test_both_experts_of_a_top_2_router_are_read_from_its_combine_weights(family_named: Any) -> None:
    family = family_named["nllb_moe"]
    model = family.build()
    sites = find_as_stated(family, model)
    read, calls = run_and_read(family, model)
    for key, output in read.items():
        (_, first_expert, weights), _ = calls[sites[key].name.replace("router", "experts")]
        ours = as_map(output.expert_ids, 8)
        assert torch.equal(ours.bool(), weights > 0)
        assert torch.equal(ours & first_expert, first_expert)
        assert torch.equal(ours, chosen(output.scores, 2))


def test_the_expert_that_skips_the_layer_is_the_last_one_and_not_expert_0(family_named: Any) -> None:
    family = family_named["zaya"]
    model = family.build()
    sites = find_as_stated(family, model)
    for site in sites.values():
        site.module.balancing_biases[-1] = 0.2
    read, calls = run_and_read(family, model)
    for key, output in read.items():
        own = (output.scores.softmax(-1) + sites[key].module.balancing_biases).argmax(-1, keepdim=True)
        assert torch.equal(output.expert_ids, own)
        received, _ = calls[sites[key].name.replace("gate", "experts")]
        assert torch.equal(output.expert_ids.masked_fill(own == 8, 0), received[1])
    assert sum(int((output.expert_ids == 8).sum()) for output in read.values()) > 0


def test_all_families_of_this_release_are_in_the_table(family_named: Any) -> None:
    models = Path(transformers.__file__).parent / "models"
    recorded = {
        path.parent.name for path in models.glob("*/modeling_*.py") if '"router_logits": OutputRec' in path.read_text()
    }
    assert recorded <= set(family_named)


def test_the_two_decoders_of_an_omni_model_are_two_blocks() -> None:
    module = importlib.import_module("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    text = dict.fromkeys(["num_hidden_layers", "num_experts_per_tok", "num_key_value_heads"], 2)
    text |= dict.fromkeys(
        ["hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"],
        64,
    )
    config = module.Qwen3OmniMoeForConditionalGeneration.config_class(
        thinker_config={"text_config": text, "vision_config": {"depth": 1}, "audio_config": {"encoder_layers": 1}},
        talker_config={"text_config": text, "spatial_merge_size": 2, "code_predictor_config": {"num_hidden_layers": 1}},
    )
    with torch.device("meta"):
        sites = find_routers(module.Qwen3OmniMoeForConditionalGeneration(config))
    assert [str(site.key) for site in sites] == ["decoder.0", "decoder.1", "talker.0", "talker.1"]

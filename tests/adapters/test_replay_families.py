"""Random routes replayed into every family of transformers: the experts get them, with weights of the live scores."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_telemetry as mt
from moe_telemetry.routers import RouterOutput, RouterSite

REFUSED = {
    "dbrx": "only seen once chosen",
    "deepseek_v2": "outside its own groups are zero",
    "doge": "only seen once chosen",
    "nllb_moe": "no top-k",
    "phimoe": "no top-k",
    "switch_transformers": "no top-k",
    "zaya": "skip expert",
}
# text and vision tokens go to different routers, so there is no one row per token
APART = {"ernie4_5_vl_moe"}
# its routers give dense scores: what it chose is read as a map, which is no route
MAPPED = {"llama4"}
HASHED = {"deepseek_v4"}


def random_routes(monitor: mt.Monitor, num_tokens: int) -> mt.Routes:
    sites = [tap.site for tap in monitor._taps.values()]
    generator = torch.Generator().manual_seed(1)
    num_experts = min(site.num_experts for site in sites)
    rows = torch.rand(num_tokens, len(sites), num_experts, generator=generator)
    keys = tuple(site.key for site in sites)
    return mt.Routes(rows.topk(sites[0].top_k or 2).indices, (num_tokens,), keys)


def outputs(monitor: mt.Monitor, stack: ExitStack) -> dict[mt.RouterKey, RouterOutput]:
    seen: dict[mt.RouterKey, RouterOutput] = {}

    def hook(site: RouterSite) -> Any:
        def read(_module: object, args: Any, kwargs: Any, output: object) -> None:
            seen[site.key] = site.read(args, kwargs, output)

        return read

    for tap in monitor._taps.values():
        assert tap.site.module is not None
        stack.callback(tap.site.module.register_forward_hook(hook(tap.site), with_kwargs=True).remove)
    return seen


def test_the_experts_get_the_replayed_routes_with_weights_of_the_live_scores(family: Any) -> None:
    model = family.build()
    with mt.watch(model, scores=False) as monitor, ExitStack() as stack:
        seen = outputs(monitor, stack)
        routes = random_routes(monitor, 20)
        if family.name in REFUSED or family.name in APART:
            with pytest.raises(mt.RoutesError), monitor.replay(routes):
                family.run(model)
            return
        with monitor.replay(routes):
            family.run(model)
        layers = monitor.snapshot().layers
        hashed = {key for key, tap in monitor._taps.items() if not tap.site.chooses_by_score}
    assert bool(hashed) == (family.name in HASHED)
    for key, output in seen.items():
        if key in hashed:
            assert layers[key].replay is None
            continue
        assert output.expert_ids is not None
        assert same_sets(output.expert_ids.view(20, -1), routes.layer(key))
        assert output.weights is not None
        assert torch.isfinite(output.weights).all()
        assert (output.weights != 0).float().mean() > 0.98
        replay = layers[key].replay
        assert replay is not None
        assert replay.replayed == replay.checked + replay.placeholder == 20


def test_both_routers_of_a_layer_whose_attention_has_experts_too_are_replayed_into(family_named: Any) -> None:
    family = family_named["jetmoe"]
    model = family.build()
    with mt.watch(model, scores=False) as monitor, ExitStack() as stack:
        seen = outputs(monitor, stack)
        routes = random_routes(monitor, 20)
        with monitor.replay(routes):
            family.run(model)
    assert len(seen) == 2 * model.config.num_hidden_layers
    for key, output in seen.items():
        assert output.expert_ids is not None
        assert same_sets(output.expert_ids.view(20, -1), routes.layer(key))


def same_sets(ids_TK: Tensor, routes_TK: Tensor) -> bool:
    return torch.equal(ids_TK.sort(-1).values, routes_TK.to(ids_TK.dtype).sort(-1).values)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_that_cannot_be_replayed_into_says_so_by_name_and_can_be_checked(name: str, family_named: Any) -> None:
    family = family_named[name]
    model = family.build()
    with mt.watch(model, scores=False) as monitor:
        with torch.no_grad(), monitor.record() as recording:
            family.run(model)
        routes = recording.routes()
        with pytest.raises(mt.RoutesError, match=f"cannot be replayed into: .*{REFUSED[name]}"), monitor.replay(routes):
            pass
        with monitor.check(routes):
            family.run(model)
        checked = [layer.replay for layer in monitor.snapshot().layers.values() if layer.replay is not None]
    assert checked
    assert all(replay.agreement in (None, 1.0) for replay in checked)


@pytest.mark.parametrize("name", sorted(MAPPED))
def test_a_router_with_dense_scores_is_replayed_into_too(name: str, family_named: Any) -> None:
    family = family_named[name]
    model = family.build()
    with mt.watch(model, scores=False) as monitor, ExitStack() as stack:
        seen = outputs(monitor, stack)
        routes = random_routes(monitor, 20)
        with monitor.replay(routes):
            family.run(model)
    for key, output in seen.items():
        assert output.routing_map is not None
        chosen = output.routing_map.view(20, -1)
        expected = torch.zeros_like(chosen).scatter(1, routes.layer(key).long(), 1)
        assert torch.equal(chosen.bool(), expected.bool())

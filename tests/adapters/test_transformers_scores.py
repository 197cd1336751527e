"""Score statistics of real models against a computation of their own, in float64 and token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_telemetry as mt
from moe_telemetry.adapters.transformers import find_routers
from moe_telemetry.routers import RouterOutput, RouterSite

MASK = torch.tensor([[1] * 10, [1] * 4 + [0] * 6])
KEPT = MASK.flatten() > 0


def _forward(model: nn.Module) -> None:
    with torch.no_grad():
        model(input_ids=torch.arange(3, 23).view(2, 10), attention_mask=MASK, use_cache=False)


def _hooked(model: nn.Module, site: RouterSite) -> RouterOutput:
    """Return what a hook of the test's own sees of one router in one forward."""
    seen: list[RouterOutput] = []

    def keep(_module: nn.Module, args: Any, output: Any) -> None:
        seen.append(site.read(args, {}, output))

    assert site.module is not None
    handle = site.module.register_forward_hook(keep)
    _forward(model)
    handle.remove()
    return seen[0]


def _probabilities(row: list[float], what: str) -> list[float]:
    activated = {
        "probabilities": lambda score: score,
        "softmax": lambda score: math.exp(score - max(row)),
        "sigmoid": lambda score: 1 / (1 + math.exp(-score)),
    }[what]
    values = [activated(score) for score in row]
    return [value / sum(values) for value in values]


def _statistics(scores_TE: Tensor, ids_TK: Tensor, what: str, *, is_biased: bool) -> dict[str, float]:
    """Return the means over tokens, with plain numbers."""
    of_tokens: dict[str, list[float]] = {}
    num_experts, top_k = scores_TE.shape[1], ids_TK.shape[1]
    for row, chosen in zip(scores_TE.double().tolist(), ids_TK.tolist(), strict=True):
        p = _probabilities(row, what)
        ranked = sorted(p, reverse=True)
        floor, ceiling = ranked[top_k - 1], ranked[top_k]
        values = {
            "score_mean": sum(row) / num_experts,
            "entropy": -sum(value * math.log(value) for value in p) / math.log(num_experts),
            "selected_mass": sum(p[expert] for expert in chosen),
            "boundary_margin": (floor - ceiling) / max(floor, 2**-23),
        }
        if what != "probabilities":
            values["z"] = math.log(sum(map(math.exp, row))) ** 2
        if is_biased:
            values["bias_overlap"] = sum(p[expert] >= floor for expert in chosen) / top_k
        for name, value in values.items():
            of_tokens.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in of_tokens.items()}


@pytest.mark.parametrize(
    ("name", "what"), [("qwen3_moe", "softmax"), ("deepseek_v3", "sigmoid"), ("gemma4", "probabilities")]
)
def test_statistics_of_real_tokens_equal_a_recomputation_from_the_routers_own_output(
    family_named: Any, name: str, what: str
) -> None:
    model = family_named[name].build()
    with mt.watch(model, every_n_steps=1) as monitor:
        _forward(model)
        snapshot = monitor.step(1)
    assert snapshot is not None
    for site in find_routers(model):
        output = _hooked(model, site)
        assert output.scores is not None
        assert output.expert_ids is not None
        found = snapshot.layers[site.key].window["eval"].scores
        assert found is not None
        expected = _statistics(output.scores[KEPT], output.expert_ids[KEPT], what, is_biased=site.is_biased)
        assert (found.rows, found.nan_rows, found.infinite_rows) == (14, 0, 0)
        assert {field: getattr(found, field) for field in expected} == pytest.approx(expected, rel=1e-4)
        largest = None if what == "probabilities" else pytest.approx(float(output.scores[KEPT].max()))
        assert found.logit_max == largest
        bias = site.expert_bias()
        assert found.bias_max == (None if bias is None else pytest.approx(float(bias.max())))


def test_a_rebuilt_bias_is_read_anew(family_named: Any) -> None:
    model = family_named["deepseek_v3"].build()
    with mt.watch(model, every_n_steps=1) as monitor:
        _forward(model)
        for site in find_routers(model):
            assert site.module is not None
            site.module.e_score_correction_bias = torch.full((8,), 3.0)
        snapshot = monitor.step(1)
    assert snapshot is not None
    for layer in snapshot.layers.values():
        assert layer.window["eval"].scores is not None
        assert layer.window["eval"].scores.bias_min == 3.0


def test_diagnostics_by_sequence_tell_the_choice_by_score_from_the_choice_with_the_bias(family_named: Any) -> None:
    model = family_named["deepseek_v3"].build()
    with mt.watch(model, per_sequence=True) as monitor:
        _forward(model)
        found = monitor.router_diagnostics()
    for site in find_routers(model):
        output = _hooked(model, site)
        assert output.scores is not None
        assert output.expert_ids is not None
        scores_TE = output.scores.sigmoid()
        maps = [
            torch.zeros(20, 8).scatter_(1, ids, 1).view(2, 10, 8).transpose(0, 1).flatten(0, 1)
            for ids in (scores_TE.topk(2).indices, output.expert_ids)
        ]
        scores = (scores_TE / scores_TE.sum(1, keepdim=True)).view(2, 10, 8).transpose(0, 1).flatten(0, 1)
        expected = mt.build_router_diagnostics(scores, *maps, site.expert_bias(), 10, 2, (MASK == 0).t())
        torch.testing.assert_close(found[site.key], expected)

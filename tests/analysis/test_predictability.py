"""Predictability: against a plain reference, known answers, exact pairing, and what cannot be predicted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import moe_telemetry as mt
from moe_telemetry import RouterKey, TraceError
from moe_telemetry.analysis import PairPredictability, predictability
from moe_telemetry.analysis.predicting import _SCORES, _Gate, top_k_map
from moe_telemetry.testing import make_trace
from moe_telemetry.testing.models import TinyMoe
from moe_telemetry.trace.format import tensor_name
from moe_telemetry.trace.manifest import Manifest
from tests.analysis.plain_reference import plain_figures
from tests.analysis.trace_files import call, write_trace

FIRST, SECOND = RouterKey("decoder", 1), RouterKey("decoder", 2)
EYE = np.eye(4, dtype=np.float32)


def _states(*experts: int) -> NDArray[np.float32]:
    """Return hidden states for which a router with unit weights prefers these experts."""
    return EYE[list(experts)]


def _hidden(key: RouterKey, states: Any, step: int = 0, microbatch: int = 0) -> dict[str, Any]:
    return {tensor_name("hidden_states", step, microbatch, key): states}


def _weights(*keys: RouterKey, steps: int = 1, weight: Any = EYE) -> dict[str, Any]:
    return {tensor_name("router_weights", step, 0, key): weight for step, key in itertools.product(range(steps), keys)}


def _pair(folder: Path, calls: list[Mapping[str, Any]], tensors: dict[str, Any], **options: Any) -> PairPredictability:
    write_trace(folder, calls, tensors=tensors, **{"num_experts": 4, "keys": [FIRST, SECOND], **options})
    (pair,) = predictability(folder).pairs
    return pair


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 1},
        {"is_biased": True},
        {"is_biased": True, "score_function": "sigmoid"},
        {"is_biased": True, "score_function": "sqrtsoftplus"},
        {"num_padding": 11},
        {"num_experts": 128, "top_k": 8, "num_tokens": 16},
    ],
)
def test_figures_are_those_of_a_plain_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    shape = {"num_experts": 16, "top_k": 3, "num_tokens": 24, "num_padding": 0, **changes}
    make_trace(tmp_path, hidden_size=6, num_steps=3, num_microbatches=2, steps_per_part=1, **shape)
    num_experts, top_k = shape["num_experts"], shape["top_k"]
    expected = plain_figures(tmp_path, num_experts, top_k, shape["num_tokens"] - shape["num_padding"])
    result = predictability(tmp_path)
    assert [pair.router.layer for pair in result.pairs] == [1, 2]
    for pair, values in zip(result.pairs, expected, strict=True):
        found = (
            pair.recall,
            pair.prediction.cosine,
            pair.prediction.spearman,
            pair.prediction.hot_overlap,
            pair.last_step.cosine,
            pair.last_step.spearman,
            pair.last_step.hot_overlap,
        )
        assert found == pytest.approx(values, abs=1e-9)
        assert pair.chance_recall == top_k / num_experts
        assert (pair.num_steps, pair.num_calls, pair.calls_without_tensors) == (3, 6, 0)


# --- known answers


def test_states_that_do_not_change_predict_everything(tmp_path: Path) -> None:
    ids = [[0], [2], [2], [3]]
    calls = [call(ids, FIRST), call(ids, SECOND)]
    pair = _pair(tmp_path, calls, _hidden(FIRST, _states(0, 2, 2, 3)) | _weights(SECOND))
    assert (pair.router, pair.previous) == (SECOND, FIRST)
    assert (pair.recall, pair.chance_recall) == (1.0, 0.25)
    assert pair.predicted == pair.actual == (1, 0, 2, 1)
    assert (pair.prediction.cosine, pair.prediction.spearman, pair.prediction.hot_overlap) == (1.0, 1.0, 1.0)
    assert (pair.last_step.cosine, pair.last_step.spearman, pair.last_step.hot_overlap) == (None, None, None)


def test_a_load_can_be_right_where_no_token_is(tmp_path: Path) -> None:
    calls = [call([[0], [2], [2], [3]], FIRST), call([[2], [0], [3], [2]], SECOND)]
    pair = _pair(tmp_path, calls, _hidden(FIRST, _states(0, 2, 2, 3)) | _weights(SECOND))
    assert (pair.recall, pair.prediction.cosine) == (0.0, 1.0)


def test_the_load_of_the_step_before_is_the_baseline(tmp_path: Path) -> None:
    loads = ([[0], [0]], [[0], [1]], [[3], [3]])
    calls = [call(ids, key, step=step) for step, ids in enumerate(loads) for key in (FIRST, SECOND)]
    states = (_states(0, 0), _states(0, 1), _states(0, 0))
    tensors = _weights(SECOND, steps=3)
    for step, each in enumerate(states):
        tensors |= _hidden(FIRST, each, step)
    pair = _pair(tmp_path, calls, tensors)
    assert pair.recall == 4 / 6
    # the first two steps are as predicted, the third has nothing in common
    assert pair.prediction.cosine == pytest.approx(2 / 3)
    # two tokens of one expert and one of each: 45 degrees apart; then nothing in common
    assert pair.last_step.cosine == pytest.approx((1 / math.sqrt(2) + 0) / 2)
    assert (pair.last_step.hot_shared, pair.last_step.hot_possible) == (1, 2)


def test_a_constant_load_has_no_rank_correlation(tmp_path: Path) -> None:
    ids = [[0], [1], [2], [3]]
    pair = _pair(
        tmp_path, [call(ids, FIRST), call(ids, SECOND)], _hidden(FIRST, _states(0, 1, 2, 3)) | _weights(SECOND)
    )
    assert (pair.prediction.spearman, pair.prediction.spearman_count) == (None, 0)
    assert (pair.prediction.cosine, pair.recall) == (1.0, 1.0)


def test_a_bias_decides_only_where_the_router_has_one(tmp_path: Path) -> None:
    calls = [call([[3], [3]], FIRST), call([[3], [3]], SECOND)]
    bias = {tensor_name("expert_bias", 0, 0, SECOND): np.array([0, 0, 0, 5], np.float32)}
    tensors = _hidden(FIRST, _states(0, 1)) | _weights(SECOND) | bias
    assert _pair(tmp_path / "biased", calls, tensors, is_biased=True).recall == 1.0
    assert _pair(tmp_path / "plain", calls, tensors).recall == 0.0


def test_padding_takes_no_part_whatever_its_states_are(tmp_path: Path) -> None:
    states = _states(0, 1, 2)
    states[1] = np.nan
    calls = [call([[0], [1], [2]], key, valid=[True, False, True]) for key in (FIRST, SECOND)]
    pair = _pair(tmp_path, calls, _hidden(FIRST, states) | _weights(SECOND))
    assert (pair.tokens, pair.tokens_not_finite, pair.recall, pair.actual) == (2, 0, 1.0, (1, 0, 1, 0))


def test_a_real_token_with_states_that_are_not_finite_is_counted_apart(tmp_path: Path) -> None:
    states = _states(0, 1, 2)
    states[1, 0] = np.inf
    write_trace(
        tmp_path,
        [call([[0], [1], [2]], key) for key in (FIRST, SECOND)],
        tensors=_hidden(FIRST, states) | _weights(SECOND),
        num_experts=4,
        keys=[FIRST, SECOND],
    )
    result = predictability(tmp_path)
    assert (result.pairs[0].tokens, result.pairs[0].tokens_not_finite, result.pairs[0].actual) == (2, 1, (1, 0, 1, 0))
    assert any("NaN or infinite" in note for note in result.notes)


def test_decode_tokens_alone(tmp_path: Path) -> None:
    calls = [call([[0], [1], [1]], key, sequence_starts=[0, 1]) for key in (FIRST, SECOND)]
    tensors = _hidden(FIRST, _states(0, 2, 2)) | _weights(SECOND)
    write_trace(tmp_path, calls, tensors=tensors, num_experts=4, keys=[FIRST, SECOND])
    (pair,) = predictability(tmp_path, decode=True).pairs
    assert (pair.tokens, pair.recall) == (1, 1.0)


# --- pairing


def test_routers_are_paired_by_number_within_their_block(tmp_path: Path) -> None:
    keys = [RouterKey("decoder", layer) for layer in (1, 2, 10)]
    keys += [RouterKey("mtp0", 0), RouterKey("mtp1", 0), RouterKey("encoder", 3), RouterKey("encoder", 5)]
    make_trace(tmp_path, keys=keys, hidden_size=4)
    assert [(str(pair.previous), str(pair.router)) for pair in predictability(tmp_path).pairs] == [
        ("encoder.3", "encoder.5"),
        ("decoder.1", "decoder.2"),
        ("decoder.2", "decoder.10"),
    ]


def test_a_microbatch_meets_its_own_states_and_the_weights_of_its_step(tmp_path: Path) -> None:
    calls = [call([[expert]], key, microbatch=expert) for expert in range(3) for key in (FIRST, SECOND)]
    tensors = _weights(SECOND)
    for expert in range(3):
        tensors |= _hidden(FIRST, _states(expert), microbatch=expert)
    assert _pair(tmp_path, calls, tensors).recall == 1.0


def test_weights_of_a_step_may_lie_in_an_earlier_part_or_on_another_rank(tmp_path: Path) -> None:
    make_trace(tmp_path / "whole", hidden_size=4, token_groups=(0, 1), num_microbatches=2)
    make_trace(tmp_path / "apart", hidden_size=4, token_groups=(0, 1), num_microbatches=2)
    _drop_tensors(tmp_path / "apart" / "tensors-00001-000000.safetensors", "router_weights")
    assert predictability(tmp_path / "apart").pairs == predictability(tmp_path / "whole").pairs


def _drop_tensors(path: Path, prefix: str) -> None:
    from safetensors.numpy import load_file, save_file

    save_file({name: value for name, value in load_file(path).items() if not name.startswith(prefix)}, path)


def test_calls_whose_tensors_were_lost_are_left_out_and_told(tmp_path: Path) -> None:
    make_trace(tmp_path, hidden_size=4)
    _drop_tensors(tmp_path / "tensors-00000-000000.safetensors", "hidden_states/1/0/decoder.0")
    result = predictability(tmp_path)
    assert [(pair.num_calls, pair.calls_without_tensors, pair.tokens) for pair in result.pairs] == [
        (3, 1, 192),
        (4, 0, 256),
    ]
    assert "router calls without weights, or without hidden states of the router before: 1, left out" in result.notes


def test_states_of_other_tokens_are_not_used(tmp_path: Path) -> None:
    calls = [call([[0], [1]], FIRST), call([[0], [1]], SECOND)]
    write_trace(
        tmp_path,
        calls,
        tensors=_hidden(FIRST, _states(0, 1, 2)) | _weights(SECOND),
        num_experts=4,
        keys=[FIRST, SECOND],
    )
    with pytest.raises(TraceError, match="none of 1 router calls of .* has its weights and the hidden states"):
        predictability(tmp_path)


def test_dtypes_of_models_give_the_same_choice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(5, 3).to(torch.bfloat16), torch.randn(4, 3).to(torch.bfloat16)
    ids = (states.double() @ weight.double().T).topk(2).indices.tolist()
    calls = [call(ids, key) for key in (FIRST, SECOND)]
    results = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        folder = tmp_path / str(dtype)
        write_trace(folder, calls, num_experts=4, keys=[FIRST, SECOND], tensors={"x": np.zeros(1)})
        from safetensors.torch import save_file

        tensors = _hidden(FIRST, states.to(dtype)) | _weights(SECOND, weight=weight.to(dtype))
        save_file(tensors, folder / "tensors-00000-000000.safetensors")
        results.append(predictability(folder).pairs[0])
    assert results[0] == results[1] == results[2]
    assert results[0].recall == 1.0


def test_a_real_capture_is_predicted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyMoe(num_layers=3)
    inputs: list[torch.Tensor] = []
    for layer in model.layers:
        layer.gate.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach()))
    capture = {"hidden_states": True, "router_weights": True}
    with mt.watch(model, routers=model.routers) as monitor, monitor.trace(tmp_path, **capture):
        for step in range(2):
            model(torch.randn(2, 8, 16))
            monitor.step(step)
    for number, pair in enumerate(predictability(tmp_path).pairs, start=1):
        weight = model.layers[number].gate.weight.detach().double()
        guesses = [(inputs[3 * step + number - 1].double() @ weight.T).topk(2).indices for step in range(2)]
        actual = [(inputs[3 * step + number].double() @ weight.T).topk(2).indices for step in range(2)]
        hits = sum(
            len(set(g) & set(a))
            for gs, xs in zip(guesses, actual, strict=True)
            for g, a in zip(gs.tolist(), xs.tolist(), strict=True)
        )
        assert (pair.hits, pair.choices) == (hits, 2 * 16 * 2)


# --- what cannot be predicted


@pytest.mark.parametrize("present", [(), ("hidden_states",), ("router_weights",)])
def test_a_capture_without_states_or_weights_says_which_options_make_them(
    present: tuple[str, ...], tmp_path: Path
) -> None:
    make_trace(tmp_path, hidden_size=4)
    path = tmp_path / "manifest-00000.json"
    manifest = (
        path.read_text().replace('"hidden_states"', '"scores"') if "hidden_states" not in present else path.read_text()
    )
    if "router_weights" not in present:
        manifest = manifest.replace('"router_weights"', '"diagnostics"')
    path.write_text(manifest)
    assert set(Manifest.from_json(manifest).tensors) >= set(present)
    with pytest.raises(
        TraceError, match=r"monitor\.trace\(\.\.\., hidden_states=True, router_weights=True\)"
    ) as raised:
        predictability(tmp_path)
    assert all(f"no {name}" not in str(raised.value) for name in present)


def test_one_layer_alone_has_nothing_before_it(tmp_path: Path) -> None:
    make_trace(tmp_path, keys=[RouterKey("decoder", 1), RouterKey("mtp0", 2)], hidden_size=4)
    with pytest.raises(TraceError, match=r"two routers of one block, one after the other; .* has decoder\.1, mtp0\.2"):
        predictability(tmp_path)


def test_a_selection_that_leaves_nothing_says_what_there_is(tmp_path: Path) -> None:
    make_trace(tmp_path, hidden_size=4)
    with pytest.raises(TraceError, match="--stage eval leaves no token: .* has steps 0 to 3 of train"):
        predictability(tmp_path, stage="eval")


def test_weights_that_do_not_fit_the_states_are_named(tmp_path: Path) -> None:
    calls = [call([[0]], FIRST), call([[0]], SECOND)]
    tensors = _hidden(FIRST, np.ones((1, 7), np.float32)) | _weights(SECOND)
    with pytest.raises(
        TraceError, match=r"the weights of decoder\.2 are \[4, 4\], the hidden states before it \[1, 7\]"
    ):
        _pair(tmp_path, calls, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": np.ones(4, np.float32)}, r"the weights of decoder\.2 are \[4\], the hidden states"),
        ({"hidden": np.ones(1, np.float32)}, r"the hidden states before it \[1\]; expected \[4, H\] and \[T, H\]"),
        ({"bias": np.ones(3, np.float32)}, r"the bias of decoder\.2 is \[3\]; expected \[4\]"),
        (
            {"weight": np.ones((4, 4), np.int8)},
            r"tensors-00000-000000\.safetensors has a tensor of I8; expected",
        ),
        ({"score_function": "cosine"}, "decoder.2 has scores by 'cosine'; this version knows softmax, sigmoid"),
    ],
)
def test_tensors_of_another_form_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = _hidden(FIRST, changes.get("hidden", np.ones((1, 4), np.float32)))
    tensors |= {f"router_weights/0/0/{SECOND}": changes.get("weight", np.ones((4, 4), np.float32))}
    tensors |= {f"expert_bias/0/0/{SECOND}": changes.get("bias", np.ones(4, np.float32))}
    write_trace(
        tmp_path,
        [call([[0]], FIRST), call([[0]], SECOND)],
        tensors=tensors,
        num_experts=4,
        is_biased=True,
        score_function=changes.get("score_function", "softmax"),
    )
    with pytest.raises(TraceError, match=message):
        predictability(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "header", "no json", "offsets"])
def test_a_damaged_file_of_tensors_is_named(damage: str, tmp_path: Path) -> None:
    make_trace(tmp_path, hidden_size=4)
    path = tmp_path / "tensors-00000-000001.safetensors"
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-100],
            "header": (2**60).to_bytes(8, "little") + content[8:],
            "no json": content[:8] + b"?" + content[9:],
            "offsets": content.replace(b'"F32"', b'"F64"', 1),
        }[damage]
    )
    with pytest.raises(
        TraceError, match=r"tensors-00000-000001\.safetensors is no whole safetensors file \(.*\); copy it"
    ):
        predictability(tmp_path)


def test_ties_go_to_the_lower_id() -> None:
    values = np.array([[1.0, 2, 2, 2], [5, 5, 5, 5], [1, 2, 3, 4], [4, 4, 1, 4]])
    assert [np.flatnonzero(row).tolist() for row in top_k_map(values, 2)] == [[1, 2], [0, 1], [2, 3], [0, 1]]
    assert top_k_map(values, 4).all()


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus", "logits"])
def test_the_choice_is_that_of_float64_where_float32_cannot_tell(function: str) -> None:
    chance = np.random.default_rng(0)
    # experts in pairs that differ by less than float32 can tell after 512 products
    weight_HE = chance.normal(size=(512, 16)).repeat(2, axis=1)
    weight_HE[:, 1::2] += chance.normal(size=(512, 16)) * 1e-7
    hidden_TH = chance.normal(size=(400, 512))
    bias = None if function == "logits" else np.zeros(32)
    gate = _Gate(weight_HE, bias, _SCORES["softmax" if bias is None else function])
    chosen, finite = gate.chosen(hidden_TH, 3)
    exact = gate.values(hidden_TH, np.float64)
    assert finite.all()
    assert (chosen == top_k_map(exact, 3)).all()
    assert (top_k_map(gate.values(hidden_TH, np.float32), 3) != chosen).any(), "float32 alone was right: no test"

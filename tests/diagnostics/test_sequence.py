"""The compact per-sequence tensor against published values and a slow float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_telemetry.diagnostics import (
    ROUTER_DIAGNOSTIC_CHANNEL_COUNT,
    RouterDiagnosticChannel,
    build_router_diagnostics,
)
from moe_telemetry.errors import ConfigError, MaskError

Channel = RouterDiagnosticChannel


@dataclass
class Call:
    scores: Tensor
    aux: Tensor
    actual: Tensor
    bias: Tensor | None
    seq_length: int
    batch_size: int
    padding: Tensor | None

    def build(self) -> Tensor:
        return build_router_diagnostics(
            self.scores, self.aux, self.actual, self.bias, self.seq_length, self.batch_size, self.padding
        )


def one_hot(experts: list[int], num_experts: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(experts), num_experts).bool()


def published() -> Call:
    scores = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.4, 0.4, 0.2], [0.7, 0.2, 0.1], [0.8, 0.1, 0.1], [0.1, 0.2, 0.7]]
    return Call(
        scores=torch.tensor(scores),
        aux=one_hot([0, 1, 0, 0, 0, 2], 3),
        actual=one_hot([1, 1, 0, 1, 2, 2], 3),
        bias=torch.tensor([0.1, -0.1, 0.0]),
        seq_length=3,
        batch_size=2,
        padding=torch.tensor([False, False, False, True, True, False]),
    )


def reference(call: Call) -> list[list[list[float]]]:
    num_experts = call.scores.shape[1]
    rows = [[float(x) for x in row] for row in call.scores.double().tolist()]
    return [
        _reference_of_sequence(
            [
                (rows[row], call.aux[row].tolist(), call.actual[row].tolist())
                for row in range(b, len(rows), call.batch_size)
                if call.padding is None or not call.padding.reshape(-1)[row]
            ],
            [0.0] * num_experts if call.bias is None else call.bias.double().tolist(),
        )
        for b in range(call.batch_size)
    ]


def _reference_of_sequence(
    tokens: list[tuple[list[float], list[bool], list[bool]]], bias: list[float]
) -> list[list[float]]:
    experts = range(len(bias))
    aux = [sum(bool(t[1][e]) for t in tokens) for e in experts]
    actual = [sum(bool(t[2][e]) for t in tokens) for e in experts]
    both = sum(bool(t[1][e] and t[2][e]) for t in tokens for e in experts)
    margins = [_reference_margin(scores, chosen) for scores, chosen, _ in tokens if any(chosen) and not all(chosen)]

    def scalar(value: float) -> list[float]:
        return [value] + [0.0] * (len(bias) - 1)

    return [
        [sum(t[0][e] for t in tokens) / max(len(tokens), 1) for e in experts],
        [count / max(sum(aux), 1) for count in aux],
        [count / max(sum(actual), 1) for count in actual],
        bias,
        scalar(both / max(sum(aux), 1)),
        scalar(float(len(tokens))),
        scalar(sum(margins) / max(len(margins), 1)),
    ]


def _reference_margin(scores: list[float], chosen: list[bool]) -> float:
    inside = [s for s, c in zip(scores, chosen, strict=True) if c]
    outside = [s for s, c in zip(scores, chosen, strict=True) if not c]
    if any(map(math.isnan, scores)):
        return math.nan
    gap = min(inside) - max(outside)
    floor = max(min(inside), 2.0**-23)
    return math.nan if math.isnan(gap) or (math.isinf(gap) and math.isinf(floor)) else max(0.0, gap) / floor


@st.composite
def calls(draw: st.DrawFn) -> Call:
    seq_length, batch_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(2, 9))
    top_k = draw(st.integers(1, num_experts))
    num_tokens = seq_length * batch_size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.rand(num_tokens, num_experts, generator=generator).softmax(1)
    bias = torch.randn(num_experts, generator=generator) * 0.1 if draw(st.booleans()) else None
    aux = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(top_k).indices, value=True)
    biased = scores if bias is None else scores + bias
    actual = torch.zeros_like(aux).scatter_(1, biased.topk(top_k).indices, value=True)
    padding = None
    if draw(st.booleans()):
        padding = torch.rand(num_tokens, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
        if draw(st.booleans()):
            padding = padding.view(seq_length, batch_size)
    for _ in range(draw(st.integers(0, 2))):
        row, expert = draw(st.integers(0, num_tokens - 1)), draw(st.integers(0, num_experts - 1))
        scores[row, expert] = draw(st.sampled_from([math.nan, math.inf]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    return Call(scores.to(dtype), aux, actual, bias, seq_length, batch_size, padding)


@settings(deadline=None, max_examples=80)
@given(calls())
def test_every_channel_equals_the_float64_reference(call: Call) -> None:
    before = call.scores.clone()
    expected = torch.tensor(reference(call), dtype=torch.float64).float()
    torch.testing.assert_close(call.build(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(call.scores, before, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=30)
@given(calls(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_stands_in_padded_rows_reaches_no_channel(call: Call, value: float) -> None:
    call.padding = torch.zeros(len(call.scores), dtype=torch.bool)
    call.padding[::2] = True
    clean = call.build()
    call.scores[::2] = value
    call.aux[::2] = True
    torch.testing.assert_close(call.build(), clean, rtol=0, atol=0, equal_nan=True)


def test_the_published_vector() -> None:
    out = published().build()
    assert out.shape == (2, ROUTER_DIAGNOSTIC_CHANNEL_COUNT, 3)
    assert out.dtype == torch.float32
    expected = {
        Channel.MEAN_SCORE: [[0.5, 0.35, 0.15], [0.15, 0.35, 0.5]],
        Channel.AUX_LOAD: [[1, 0, 0], [0, 0.5, 0.5]],
        Channel.ACTUAL_LOAD: [[0.5, 0.5, 0], [0, 0.5, 0.5]],
        Channel.EXPERT_BIAS: [[0.1, -0.1, 0], [0.1, -0.1, 0]],
        Channel.AUX_ACTUAL_OVERLAP: [[0.5, 0, 0], [1, 0, 0]],
        Channel.VALID_TOKEN_COUNT: [[2, 0, 0], [2, 0, 0]],
        Channel.TOPK_BOUNDARY_RELATIVE_MARGIN: [[0.25, 0, 0], [0.557143, 0, 0]],
    }
    for channel, values in expected.items():
        torch.testing.assert_close(out[:, channel], torch.tensor(values, dtype=torch.float32), msg=channel.name)


def test_two_experts_per_token() -> None:
    out = build_router_diagnostics(
        torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]),
        torch.tensor([[1, 1, 0], [0, 1, 1]]),
        torch.tensor([[1, 0, 1], [0, 1, 1]]),
        None,
        seq_length=2,
        batch_size=1,
    )[0]
    expected = [[0.4, 0.4, 0.2], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5], [0.0, 0, 0], [0.75, 0, 0], [2.0, 0, 0]]
    torch.testing.assert_close(out[:6], torch.tensor(expected))
    # the mean of 2/3 and 1/3
    assert out[Channel.TOPK_BOUNDARY_RELATIVE_MARGIN, 0].item() == pytest.approx(0.5)


def test_a_batch_of_padding_gives_zeros_and_the_bias() -> None:
    call = published()
    call.padding = torch.ones(6, dtype=torch.bool)
    out = call.build()
    assert torch.equal(out[:, Channel.EXPERT_BIAS], torch.tensor([[0.1, -0.1, 0.0]] * 2))
    out[:, Channel.EXPERT_BIAS] = 0
    assert not out.any()


def test_without_a_boundary_the_margin_is_zero() -> None:
    call = published()
    call.aux = torch.ones_like(call.aux)
    assert not call.build()[:, Channel.TOPK_BOUNDARY_RELATIVE_MARGIN].any()


def test_a_nan_in_a_valid_row_stays_in_its_own_sequence() -> None:
    call = published()
    clean = call.build()
    call.scores[0, 1] = math.nan
    out = call.build()
    assert torch.equal(out[1], clean[1])
    assert torch.isnan(out[0]).nonzero().tolist() == [
        [Channel.MEAN_SCORE, 1],
        [Channel.TOPK_BOUNDARY_RELATIVE_MARGIN, 0],
    ]


def test_a_mask_of_as_many_tokens_as_experts_drops_tokens_not_experts() -> None:
    # T = E = 3: a mask along the wrong axis would fit just as well
    aux = one_hot([0, 0, 2], 3)
    padding = torch.tensor([False, True, False])
    out = build_router_diagnostics(torch.full((3, 3), 1 / 3), aux, aux, None, 3, 1, padding)[0]
    torch.testing.assert_close(out[Channel.AUX_LOAD], torch.tensor([0.5, 0.0, 0.5]))


def test_nothing_reads_the_device() -> None:
    scores = torch.rand(6, 4, device="meta", requires_grad=True)
    chosen = torch.zeros(6, 4, dtype=torch.bool, device="meta")
    padding = torch.zeros(6, dtype=torch.bool, device="meta")
    out = build_router_diagnostics(scores, chosen, chosen, scores[0], 3, 2, padding)
    assert out.shape == (2, ROUTER_DIAGNOSTIC_CHANNEL_COUNT, 4)
    assert not out.requires_grad


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_length": 4}, r"\[6, 3\]; expected \[8, E\]"),
        ({"seq_length": 0}, "seq_length=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"scores": torch.rand(6)}, r"\[6\]"),
        ({"scores": torch.rand(6, 1)}, "two experts"),
        ({"scores": torch.ones(6, 3, dtype=torch.int64)}, "int64"),
        ({"aux": torch.ones(6, 2)}, r"routing_map_for_aux_loss has shape \[6, 2\]; expected \[6, 3\]"),
        ({"actual": torch.ones(3, 6)}, r"actual_routing_map has shape \[3, 6\]; expected \[6, 3\]"),
        ({"bias": torch.ones(2)}, r"expert_bias has shape \[2\]; expected \[3\]"),
    ],
)
def test_a_wrong_argument_is_named_with_both_shapes(change: dict[str, object], words: str) -> None:
    call = published()
    for name, value in change.items():
        setattr(call, name, value)
    with pytest.raises(ConfigError, match=words):
        call.build()


@pytest.mark.parametrize("shape", [(2, 3), (6, 3), (5,), (6, 1)])
def test_a_mask_of_another_layout_is_refused(shape: tuple[int, ...]) -> None:
    call = published()
    call.padding = torch.zeros(shape, dtype=torch.bool)
    with pytest.raises(MaskError, match="sequence-major"):
        call.build()

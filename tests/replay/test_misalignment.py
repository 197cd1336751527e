"""Every cause of a misaligned replay, planted in routes and found again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_telemetry.errors import MaskError, RoutesError
from moe_telemetry.replay import Misalignment, locate_misalignment

B = 4
SIZES = pytest.mark.parametrize("num_tokens", [64, 8192])
# E, K, how uneven the experts are, how often a token repeats the one before
ROUTERS = pytest.mark.parametrize(
    ("num_experts", "top_k", "skew", "repeat"),
    [(128, 8, 1.0, 0.0), (32, 4, 0.0, 0.5), (8, 2, 1.0, 0.2)],
    ids=["128x8", "32x4-repeating", "8x2-skewed"],
)


def synthetic_routes(
    num_tokens: int, num_experts: int, top_k: int, skew: float, repeat: float, seed: int = 0
) -> Tensor:
    """Return ids `[T, 5, K]` of a made-up language: few token ids, popular experts, tokens that repeat."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (num_tokens,), generator=generator)
    repeats = torch.rand(num_tokens, generator=generator) < repeat
    for position in range(1, num_tokens):
        if repeats[position]:
            tokens[position] = tokens[position - 1]
    layers = []
    for _ in range(5):
        meaning = torch.randn(256, num_experts, generator=generator)[tokens]
        context = 0.3 * torch.randn(num_tokens, num_experts, generator=generator)
        popularity = skew * torch.randn(num_experts, generator=generator)
        layers.append((meaning + context + popularity).topk(top_k).indices)
    return torch.stack(layers, 1)


def with_noise(ids: Tensor, num_experts: int, ratio: float) -> Tensor:
    """Return a copy in which the last choice of a `ratio` of rows is another expert, as rounding does it."""
    generator = torch.Generator().manual_seed(5)
    ids = ids.clone()
    hit = torch.rand(ids.shape[:2], generator=generator) < ratio
    other = torch.randint(0, num_experts, ids.shape[:2], generator=generator)
    hit &= ~(ids == other[..., None]).any(-1)
    ids[..., -1] = torch.where(hit, other, ids[..., -1])
    return ids


def by_sequence(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `change` of `[B, S, L, K]`, applied to flattened batch-first rows."""
    return lambda ids: change(ids.unflatten(0, (B, -1))).flatten(0, 1)


def _zigzag(ids: Tensor) -> Tensor:
    return ids.unflatten(1, (4, -1))[:, [0, 3, 1, 2]].flatten(1, 2)


def _stale(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[4 : 4 + len(ids) // 6] = ids[3]
    return ids


PLANTED: dict[str, tuple[str, int, Callable[[Tensor], Tensor]]] = {
    "late by 1": ("token_shift", 1, by_sequence(lambda ids: ids.roll(1, 1))),
    "early by 1": ("token_shift", -1, by_sequence(lambda ids: ids.roll(-1, 1))),
    "late by 5": ("token_shift", 5, by_sequence(lambda ids: ids.roll(5, 1))),
    "early by 7": ("token_shift", -7, by_sequence(lambda ids: ids.roll(-7, 1))),
    "transposed": ("batch_sequence_swap", 0, by_sequence(lambda ids: ids.transpose(0, 1))),
    "layer before": ("layer_shift", 1, lambda ids: ids.roll(1, 1)),
    "two layers after": ("layer_shift", -2, lambda ids: ids.roll(-2, 1)),
    "zig-zag": ("context_parallel_order", 0, by_sequence(_zigzag)),
    "other samples": ("sequence_swap", 0, by_sequence(lambda ids: ids[[1, 2, 3, 0]])),
    "stale": ("stale_rows", 0, _stale),
    "shuffled": (
        "random",
        0,
        lambda ids: ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))],
    ),
    "healthy": ("aligned", 0, lambda ids: ids),
}
CAUSES = pytest.mark.parametrize("planted", PLANTED)


def check_cause(own: Tensor, planted: str, num_experts: int) -> Misalignment:
    cause, offset, change = PLANTED[planted]
    replayed = change(with_noise(own, num_experts, 0.01))
    found = locate_misalignment(replayed.to(torch.int16), own, num_experts=num_experts, batch_size=B)
    assert (found.cause, found.offset) == (cause, offset), found
    if cause not in {"aligned", "random"}:
        assert found.restored_agreement is not None
        assert found.agreement is not None
        assert found.restored_agreement > 0.9 > found.agreement
    return found


@SIZES
@ROUTERS
@CAUSES
def test_a_planted_cause_is_found(
    num_tokens: int, num_experts: int, top_k: int, skew: float, repeat: float, planted: str
) -> None:
    own = synthetic_routes(num_tokens, num_experts, top_k, skew, repeat)
    check_cause(own, planted, num_experts)


@SIZES
@pytest.mark.parametrize("skew", [0.0, 1.5])
def test_a_consistent_renaming_of_experts_is_found(num_tokens: int, skew: float) -> None:
    own = synthetic_routes(num_tokens, 128, 8, skew, 0.1)
    renamed = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    found = locate_misalignment(renamed[with_noise(own, 128, 0.01)], own, num_experts=128)
    assert found.cause == "expert_remap", found
    assert found.restored_agreement is not None
    assert found.restored_agreement > 0.9


def test_physical_ids_with_replicas_are_a_renaming_too() -> None:
    own = synthetic_routes(2048, 32, 4, 0.5, 0.0)[:, 0]
    replicas = torch.randint(0, 2, own.shape, generator=torch.Generator().manual_seed(2))
    physical = torch.arange(32).flip(0)[own] + 32 * replicas * (own < 8)
    found = locate_misalignment(physical, own, num_experts=32)
    assert found.cause == "expert_remap", found


@SIZES
def test_ids_cut_to_eight_bits_are_found(num_tokens: int) -> None:
    own = synthetic_routes(num_tokens, 512, 8, 0.5, 0.1)
    found = locate_misalignment(with_noise(own, 512, 0.01).to(torch.uint8), own, num_experts=512)
    assert found.cause == "dtype_wrap", found
    signed = synthetic_routes(num_tokens, 256, 8, 0.5, 0.1)
    assert locate_misalignment(signed.to(torch.int8), signed, num_experts=256).cause == "dtype_wrap"


@SIZES
@ROUTERS
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.05])
def test_a_healthy_replay_is_aligned(
    num_tokens: int, num_experts: int, top_k: int, skew: float, repeat: float, ratio: float
) -> None:
    own = synthetic_routes(num_tokens, num_experts, top_k, skew, repeat)
    replayed = with_noise(own, num_experts, ratio)
    for kept in (slice(None), slice(0, 1)):
        found = locate_misalignment(replayed[:, kept], own[:, kept], num_experts=num_experts, batch_size=B)
        assert found.aligned, found
    # every sample ends with a copy of its last but one row, as inference leaves it
    replayed.unflatten(0, (B, -1))[:, -1] = replayed.unflatten(0, (B, -1))[:, -2]
    assert locate_misalignment(replayed, own, num_experts=num_experts, batch_size=B).aligned


@SIZES
def test_top_1_routes_of_repeating_tokens_are_aligned(num_tokens: int) -> None:
    own = synthetic_routes(num_tokens, 8, 1, 0.5, 0.5)
    found = locate_misalignment(with_noise(own, 8, 0.05), own, num_experts=8, batch_size=B)
    assert found.aligned, found


def test_one_expert_that_takes_nearly_everything_is_no_misalignment() -> None:
    own = synthetic_routes(2048, 16, 2, 0.0, 0.0)
    own[..., 0] = 15
    own[..., 1] = torch.where(torch.rand(own.shape[:2]) < 0.9, 14, own[..., 1].clamp(max=13))
    assert locate_misalignment(with_noise(own, 16, 0.01), own, num_experts=16).aligned
    assert locate_misalignment(own[torch.randperm(2048)], own, num_experts=16).cause == "random"


@SIZES
def test_one_layer_is_enough_for_a_shift_and_batch_and_sequence_need_not_be_known(num_tokens: int) -> None:
    own = synthetic_routes(num_tokens, 128, 8, 1.0, 0.0)[:, 0]
    found = locate_misalignment(own.roll(1, 0), own, num_experts=128)
    assert (found.cause, found.offset) == ("token_shift", 1)
    transposed = own.unflatten(0, (B, -1)).transpose(0, 1).flatten(0, 1)
    assert locate_misalignment(transposed, own, num_experts=128).cause == "batch_sequence_swap"
    assert locate_misalignment(own, transposed, num_experts=128, row_stride=B).cause == "batch_sequence_swap"


def test_sequence_first_rows_shift_within_their_sequences() -> None:
    own = synthetic_routes(256, 64, 4, 0.5, 0.0)[:, 0]
    found = locate_misalignment(own.roll(B, 0), own, num_experts=64, row_stride=B)
    assert (found.cause, found.offset) == ("token_shift", 1)


def test_packed_sequences_of_any_length_shift_and_swap() -> None:
    own = synthetic_routes(100, 64, 4, 0.5, 0.0)[:, 0]
    pieces = own.split([30, 25, 45])
    late = torch.cat([piece.roll(2, 0) for piece in pieces])
    starts = torch.tensor([0, 30, 55])
    found = locate_misalignment(late, own, num_experts=64, sequence_starts=starts)
    assert (found.cause, found.offset) == ("token_shift", 2)
    swapped = torch.cat([pieces[1], pieces[2][:5], pieces[2][:25], pieces[0], pieces[0][:15]])
    assert locate_misalignment(swapped, own, num_experts=64, sequence_starts=starts).cause == "sequence_swap"


@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_a_rank_tell_of_a_zigzag_cut_where_the_cuts_meet(size: int) -> None:
    own = synthetic_routes(1024, 64, 4, 0.5, 0.0)[:, 0]
    chunks = own.chunk(2 * size)
    rank = 0 if size == 2 else 2
    zigzag, contiguous = (
        torch.cat([chunks[rank], chunks[-1 - rank]]),
        torch.cat([chunks[2 * rank], chunks[2 * rank + 1]]),
    )
    found = locate_misalignment(
        contiguous, zigzag, num_experts=64, context_parallel_size=size, context_parallel_rank=rank
    )
    assert found.cause == "context_parallel_order", found


def test_invalid_tokens_take_no_part() -> None:
    own = synthetic_routes(512, 64, 4, 0.5, 0.0)[:, 0]
    replayed = own.clone()
    valid = torch.arange(512) % 128 < 64
    replayed[~valid] = own[~valid].flip(0)
    found = locate_misalignment(replayed, own, num_experts=64, valid=valid, batch_size=B)
    assert found.aligned
    assert found.agreement == 1.0


def test_the_advice_is_a_sentence_to_act_on() -> None:
    own = synthetic_routes(512, 64, 4, 0.5, 0.0)[:, 0]
    advice = locate_misalignment(own.roll(1, 0), own, num_experts=64).advice
    assert advice.startswith("routes lag their tokens by one row within sequences: agreement 0.")
    assert ", 1.00 when moved by -1" in advice
    advice = locate_misalignment(own.roll(-2, 0), own, num_experts=64).advice
    assert advice.startswith("routes lead their tokens by two rows")
    assert "when moved by +2" in advice


def test_six_rows_are_enough_where_they_agree_exactly() -> None:
    own = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [0, 2], [1, 3]])
    found = locate_misalignment(own.roll(1, 0), own, num_experts=8)
    assert (found.cause, found.offset) == ("token_shift", 1)


def test_a_capture_of_zeros_says_that_nothing_can_be_compared() -> None:
    own = synthetic_routes(128, 64, 4, 0.5, 0.0)
    found = locate_misalignment(torch.zeros_like(own), own, num_experts=64)
    assert (found.cause, found.agreement) == ("random", None)
    assert "no row can be compared (640 repeated)" in found.advice


def test_one_row_for_all_tokens_is_stale() -> None:
    own = synthetic_routes(128, 64, 4, 0.5, 0.0)[:, 0]
    assert locate_misalignment(own[:1].expand(128, 4), own, num_experts=64).cause == "stale_rows"


def test_routes_that_agree_in_part_say_so() -> None:
    own = synthetic_routes(2048, 64, 4, 0.0, 0.0)[:, 0]
    half = torch.where((torch.arange(2048) * 7919 % 2048 < 1024)[:, None], own, own.roll(1024, 0).flip(0))
    found = locate_misalignment(half, own, num_experts=64)
    assert found.cause == "random"
    assert "agree in part" in found.advice


def test_inputs_are_not_written_to_and_no_random_number_is_drawn() -> None:
    own = synthetic_routes(256, 64, 4, 0.5, 0.0)
    replayed, starts = own.roll(1, 0), torch.zeros(256, dtype=torch.bool)
    copies = own.clone(), replayed.clone(), starts.clone()
    state = torch.get_rng_state()
    locate_misalignment(replayed, own, num_experts=64, sequence_starts=starts)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(*pair) for pair in zip(copies, (own, replayed, starts), strict=True))


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"replayed": torch.zeros(5, 4, dtype=torch.int64)}, RoutesError, r"\(5, 4\), own \(8, 4\)"),
        ({"replayed": torch.zeros(8, dtype=torch.int64)}, RoutesError, r"\(8,\)"),
        ({"batch_size": 3}, RoutesError, "batch_size=3"),
        ({"valid": torch.ones(7, dtype=torch.bool)}, MaskError, r"\(7,\)"),
        ({"num_experts": 3}, RoutesError, "4 experts a row"),
        ({"replayed": torch.zeros(0, 4, dtype=torch.int64)}, RoutesError, "no rows"),
    ],
)
def test_what_does_not_fit_is_an_error(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"replayed": torch.zeros(8, 4, dtype=torch.int64), "num_experts": 16, **keywords}
    with pytest.raises(error, match=message):
        locate_misalignment(arguments.pop("replayed"), torch.zeros(8, 4, dtype=torch.int64), **arguments)


@pytest.fixture(scope="module", params=[64, 8192])
def model_routes(request: pytest.FixtureRequest) -> Tensor:
    """Return ids `[T, 5, 4]` that the routers of a tiny Qwen3-MoE choose for T tokens in B sequences."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
        initializer_range=0.2,
    )
    model = transformers.Qwen3MoeModel(config).eval()
    chosen: list[Tensor] = []
    for layer in model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
    with torch.no_grad():
        model(torch.randint(0, 512, (B, request.param // B)))
    return torch.stack(chosen, 1)


@CAUSES
def test_a_cause_planted_in_a_models_routes_is_found(model_routes: Tensor, planted: str) -> None:
    check_cause(model_routes, planted, 32)


def test_a_renaming_of_a_models_experts_is_found(model_routes: Tensor) -> None:
    renamed = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    found = locate_misalignment(renamed[with_noise(model_routes, 32, 0.01)], model_routes, num_experts=32)
    assert found.cause == "expert_remap", found


def test_a_models_ids_in_eight_bits_are_found(model_routes: Tensor) -> None:
    own = model_routes * 16 + model_routes % 16
    found = locate_misalignment(own.to(torch.uint8), own, num_experts=512)
    assert found.cause == "dtype_wrap", found

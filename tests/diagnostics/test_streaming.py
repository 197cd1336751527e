"""Streaming score statistics: exact sums, a float64 reference, and published values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_telemetry.diagnostics import ScoreFunction, as_probabilities, bias_maxima, score_tally
from moe_telemetry.errors import ConfigError, MaskError
from moe_telemetry.score_statistics import MEAN_FIELDS, NOTHING, NUM_SUM_FIELDS, ScoreStatistics, sum_fields

FUNCTIONS: tuple[ScoreFunction, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
KINDS: list[tuple[str, ScoreFunction]] = [
    *((kind, function) for kind in ("logits", "probabilities") for function in FUNCTIONS),
    ("auto", "softmax"),
    ("auto", "sigmoid"),
]


@dataclass
class Call:
    scores: Tensor
    choices: Tensor
    kind: str
    function: ScoreFunction
    valid: Tensor | None
    is_biased: bool

    def rows(self, start: int, stop: int) -> Call:
        valid = None if self.valid is None else self.valid[start:stop]
        return Call(self.scores[start:stop], self.choices[start:stop], self.kind, self.function, valid, self.is_biased)

    def tally(self) -> tuple[Tensor, Tensor]:
        return score_tally(
            self.scores,
            self.choices,
            kind=self.kind,  # type: ignore[arg-type]
            function=self.function,
            valid=self.valid,
            is_biased=self.is_biased,
        )


def activate(logits: Tensor, function: ScoreFunction) -> Tensor:
    if function == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if function == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()


@st.composite
def calls(draw: st.DrawFn, *, max_tokens: int = 40) -> Call:
    num_tokens, num_experts = draw(st.integers(0, max_tokens)), draw(st.integers(2, 40))
    top_k = draw(st.integers(1, min(num_experts, 9)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # unsorted and distinct, with a shift that a softmax does not see and a scale that peaks it
    logits = torch.randn(num_tokens, num_experts, generator=generator) * draw(st.sampled_from([0.1, 1, 8]))
    logits += draw(st.sampled_from([0, -5, 20]))
    kind, function = draw(st.sampled_from(KINDS))
    is_activated = kind == "probabilities" or (kind == "auto" and draw(st.booleans()))
    scores = activate(logits, function) if is_activated else logits
    is_biased = draw(st.booleans())
    choices = (scores + 0.3 * torch.randn(num_experts, generator=generator) * is_biased).topk(top_k).indices
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scores = scores.to(dtype)
    valid = torch.rand(num_tokens, generator=generator) < 0.7 if draw(st.booleans()) else None
    if num_tokens and draw(st.booleans()):
        row, expert = draw(st.integers(0, num_tokens - 1)), draw(st.integers(0, num_experts - 1))
        scores[row, expert] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    if num_tokens and draw(st.booleans()):
        choices[draw(st.integers(0, num_tokens - 1)), 0] = draw(st.sampled_from([-1, num_experts]))
    return Call(scores, choices, kind, function, valid, is_biased)


@settings(deadline=None, max_examples=120)
@given(calls(), st.data())
def test_the_sums_of_any_split_are_those_of_the_whole_to_the_integer(call: Call, data: st.DataObject) -> None:
    num_tokens = len(call.scores)
    cuts = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=5)))
    parts = [call.rows(a, b).tally() for a, b in zip([0, *cuts], [*cuts, num_tokens], strict=True)]
    sums, maxima = call.tally()
    assert sum(part[0] for part in parts).tolist() == sums.tolist()
    assert torch.stack([part[1] for part in parts]).amax(0).tolist() == maxima.tolist()


@settings(deadline=None, max_examples=30)
@given(calls(), st.randoms(use_true_random=False))
def test_the_sums_do_not_depend_on_the_order_of_tokens(call: Call, random: object) -> None:
    order = list(range(len(call.scores)))
    random.shuffle(order)  # type: ignore[attr-defined]
    valid = None if call.valid is None else call.valid[order]
    other = Call(call.scores[order], call.choices[order], call.kind, call.function, valid, call.is_biased)
    assert torch.equal(call.tally()[0], other.tally()[0])


def test_a_long_batch_splits_exactly_too() -> None:
    scores = torch.randn(5001, 60)
    whole = score_tally(scores, scores.topk(4).indices, kind="logits").sums
    parts = [score_tally(part, part.topk(4).indices, kind="logits").sums for part in scores.split(97)]
    assert torch.equal(sum(parts), whole)


def reference(call: Call) -> dict[str, float | None]:
    """Return the statistics by the definitions, one row at a time in float64."""
    values: dict[str, list[float]] = {field.name: [] for field in MEAN_FIELDS}
    for token, row in enumerate(call.scores.double()):
        if (call.valid is not None and not call.valid[token]) or not torch.isfinite(row).all():
            continue
        _reference_row(call, row, call.choices[token].tolist(), values)
    return {name: sum(rows) / len(rows) if rows else None for name, rows in values.items()}


def _reference_row(call: Call, row: Tensor, ids: list[int], values: dict[str, list[float]]) -> None:
    num_experts = len(row)
    are_logits = call.kind == "logits" or (call.kind == "auto" and not _is_activated(row, call.function))
    activated = activate(row, call.function) if are_logits else row
    p = activated / activated.sum()
    values["score"].append(row.mean().item())
    values["entropy"].append(-torch.special.xlogy(p, p).sum().item() / math.log(num_experts))
    if are_logits:
        values["z"].append(row.logsumexp(0).item() ** 2)
    if not all(0 <= expert < num_experts for expert in ids):
        return
    values["selected_mass"].append(p[ids].sum().item())
    own = p.topk(len(ids)).indices.tolist() if call.is_biased else ids
    if call.is_biased:
        lowest = p[own].min()
        # where others are next to the lowest, float32 (a saturated sigmoid, say) may see them tie
        is_clear = ((p - lowest).abs() < 1e-5 * lowest).sum() == 1
        values["bias_overlap"].append((p[ids] >= lowest).sum().item() / len(ids) if is_clear else math.nan)
    outside = [p[e].item() for e in range(num_experts) if e not in own]
    if outside:
        floor = p[own].min().item()
        values["boundary_margin"].append(max(0.0, floor - max(outside)) / max(floor, 2.0**-23))


def _is_activated(row: Tensor, function: ScoreFunction) -> bool:
    if row.min() < 0 or row.sum() == 0:
        return False
    return abs(row.sum().item() - 1) < 2**-7 if function == "softmax" else row.max().item() <= 1


@settings(deadline=None, max_examples=80)
@given(calls())
def test_every_mean_equals_the_float64_reference(call: Call) -> None:
    before = call.scores.clone()
    sums, _ = call.tally()
    found = ScoreStatistics.of(sums.tolist())
    expected = reference(call)
    torch.testing.assert_close(call.scores, before, rtol=0, atol=0, equal_nan=True)
    if found is None:
        assert set(expected.values()) == {None}
        return
    assert found.score_mean == approx(expected["score"])
    assert found.entropy == approx(expected["entropy"])
    assert found.z == approx(expected["z"])
    assert found.selected_mass == approx(expected["selected_mass"])
    # in float32 the scores may tie where in float64 they differ in the last place
    assert found.boundary_margin == approx(expected["boundary_margin"])
    if expected["bias_overlap"] is None or not math.isnan(expected["bias_overlap"]):
        assert found.bias_overlap == approx(expected["bias_overlap"])


def approx(value: float | None) -> object:
    return None if value is None else pytest.approx(value, rel=2e-4, abs=2e-5)


def statistics(scores: Tensor, ids: list[list[int]], **settings: object) -> ScoreStatistics:
    choices = torch.tensor(ids)
    sums, maxima = score_tally(scores, choices, **settings)  # type: ignore[arg-type]
    assignments = torch.bincount(choices.view(-1), minlength=scores.shape[1]).tolist()
    found = ScoreStatistics.of(sums.tolist(), maxima.tolist(), assignments)
    assert found is not None
    return found


def test_a_perfect_balance_has_a_balance_loss_of_one_for_any_top_k() -> None:
    found = statistics(torch.zeros(4, 4), [[0, 1], [2, 3], [0, 2], [1, 3]], kind="logits")
    assert found.balance_loss == pytest.approx(1.0)
    assert found.entropy == pytest.approx(1.0)
    assert found.selected_mass == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["logits", "auto"])
def test_logits_are_softened_once(kind: str) -> None:
    logits = torch.tensor([[4.0, 0, 0, 0]] * 3)
    found = statistics(logits, [[0]] * 3, kind=kind)
    assert found.balance_loss == pytest.approx(3.7917, abs=1e-4)
    assert found.logit_max == 4.0
    assert found.z == pytest.approx(math.log(math.exp(4) + 3) ** 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["probabilities", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probabilities_are_not_softened_again(kind: str, dtype: torch.dtype) -> None:
    probabilities = torch.tensor([[4.0, 0, 0, 0]] * 3).softmax(1).to(dtype)
    found = statistics(probabilities, [[0]] * 3, kind=kind)
    assert found.balance_loss == pytest.approx(3.7917, abs=1e-2 if dtype == torch.bfloat16 else 1e-3)
    assert found.z is None
    assert found.logit_max is None


@pytest.mark.parametrize(("function", "num_experts"), [("softmax", 8), ("softmax", 512), ("sigmoid", 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_told_from_logits(function: ScoreFunction, num_experts: int, dtype: torch.dtype) -> None:
    logits = torch.randn(256, num_experts, generator=torch.Generator().manual_seed(1))
    scores = activate(logits, function)
    given_logits = as_probabilities(logits.to(dtype), function=function)
    given_scores = as_probabilities(scores.to(dtype), function=function)
    expected = scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(given_logits, expected, rtol=0.05, atol=1e-3)
    torch.testing.assert_close(given_scores, expected, rtol=0.05, atol=1e-3)


def test_logits_of_zero_are_a_uniform_distribution() -> None:
    for kind, function in KINDS[:3] + KINDS[6:]:
        probabilities = as_probabilities(torch.zeros(1, 4), kind=kind, function=function)  # type: ignore[arg-type]
        assert probabilities.tolist() == [[0.25] * 4]


def test_rows_that_are_not_finite_are_counted_and_left_out() -> None:
    clean = torch.randn(4, 8)
    ids = clean.topk(2).indices.tolist()
    scores = torch.cat([clean, torch.zeros(4, 8)])
    scores[4, 0], scores[5, 1], scores[6, 2], scores[7, :2] = math.nan, math.inf, -math.inf, math.nan
    found = statistics(scores, ids + [[0, 1]] * 4, kind="logits")
    expected = statistics(clean, ids, kind="logits")
    assert (found.nan_rows, found.infinite_rows, found.rows) == (2, 2, 4)
    assert found.mean_probabilities == expected.mean_probabilities
    assert (found.score_mean, found.entropy, found.z) == (expected.score_mean, expected.entropy, expected.z)
    assert (found.boundary_margin, found.logit_max) == (expected.boundary_margin, expected.logit_max)


def test_a_negative_probability_is_left_out_too() -> None:
    found = statistics(torch.tensor([[0.5, 0.5], [1.5, -0.5]]), [[0], [0]], kind="probabilities")
    assert (found.rows, found.infinite_rows) == (1, 1)


def test_padding_is_in_nothing_not_even_in_the_largest_logit() -> None:
    scores = torch.tensor([[1.0, 0.0], [90.0, 0.0], [math.nan, 0.0]])
    found = statistics(scores, [[0]] * 3, kind="logits", valid=torch.tensor([True, False, False]))
    assert (found.rows, found.nan_rows, found.logit_max) == (1, 0, 1.0)


def test_a_mask_of_as_many_tokens_as_experts_drops_tokens_not_experts() -> None:
    scores = torch.eye(3)
    found = statistics(scores, [[0], [0], [2]], kind="probabilities", valid=torch.tensor([True, False, True]))
    assert found.mean_probabilities == (0.5, 0.0, 0.5)


def test_without_a_valid_token_there_are_no_statistics() -> None:
    scores = torch.randn(3, 4)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    for tally in (
        score_tally(scores, ids, valid=torch.zeros(3, dtype=torch.bool)),
        score_tally(scores[:0], ids[:0]),
    ):
        assert not tally.sums.any()
        assert tally.maxima.tolist() == [NOTHING]
        assert ScoreStatistics.of(tally.sums.tolist(), tally.maxima.tolist(), [0] * 4) is None


def test_where_every_expert_is_chosen_there_is_no_margin() -> None:
    found = statistics(torch.randn(2, 3), [[0, 1, 2]] * 2, kind="logits", is_biased=True)
    assert found.boundary_margin is None
    assert found.selected_mass == pytest.approx(1.0)
    assert found.bias_overlap == 1.0


def test_overlap_is_of_the_choice_with_the_bias_and_that_by_score_alone() -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    found = statistics(scores, [[0, 2]], kind="probabilities", is_biased=True)
    assert found.bias_overlap == 0.5
    # between the second and the third score
    assert found.boundary_margin == pytest.approx(1 / 3)
    assert found.selected_mass == pytest.approx(0.6)
    assert statistics(scores, [[0, 2]], kind="probabilities").bias_overlap is None


@pytest.mark.parametrize("is_biased", [False, True])
def test_a_routing_map_says_the_same_as_ids(is_biased: bool) -> None:
    scores = torch.randn(20, 12)
    ids = (scores + torch.randn(12)).topk(3).indices
    chosen = torch.zeros(20, 12, dtype=torch.bool).scatter_(1, ids, value=True)
    chosen[3] = False
    ids[3, 1] = -1
    expected = score_tally(scores, ids, kind="logits", is_biased=is_biased)
    found = score_tally(scores, chosen, top_k=3, kind="logits", is_biased=is_biased)
    # the mass adds up the same values in another order
    torch.testing.assert_close(found.sums, expected.sums, rtol=0, atol=20)
    assert torch.equal(found.maxima, expected.maxima)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32])
def test_expert_ids_may_be_of_any_integer_type(dtype: torch.dtype) -> None:
    scores = torch.randn(9, 7)
    ids = scores.topk(2).indices
    assert torch.equal(score_tally(scores, ids.to(dtype)).sums, score_tally(scores, ids).sums)


def test_scores_in_another_memory_order_give_the_same_integers() -> None:
    scores = torch.randn(33, 24)
    ids = scores.topk(2).indices
    turned = scores.t().contiguous().t()
    assert torch.equal(score_tally(scores, ids).sums, score_tally(turned, ids).sums)


def test_a_finite_score_of_any_size_neither_wraps_nor_poisons_a_sum() -> None:
    found = statistics(torch.tensor([[1e15, 0.0], [-1e15, 0.0], [3e38, -3e38]]), [[0], [1], [0]], kind="logits")
    assert found.rows + found.infinite_rows == 3
    assert found.z is not None
    assert 0 <= found.z <= 2**20
    assert found.entropy == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["logits", "probabilities", "auto"])
@pytest.mark.parametrize("is_biased", [False, True])
def test_nothing_reads_the_device(kind: str, is_biased: bool) -> None:
    scores = torch.rand(6, 4, device="meta", requires_grad=True)
    ids = torch.zeros(6, 2, dtype=torch.int32, device="meta")
    valid = torch.ones(6, dtype=torch.bool, device="meta")
    tally = score_tally(scores, ids, kind=kind, valid=valid, is_biased=is_biased)  # type: ignore[arg-type]
    assert tally.sums.shape == (len(sum_fields(4)),)
    assert (tally.sums.dtype, tally.maxima.dtype) == (torch.int64, torch.int64)
    chosen = torch.zeros(6, 4, dtype=torch.bool, device="meta")
    score_tally(scores, chosen, top_k=2, kind=kind, is_biased=is_biased)  # type: ignore[arg-type]
    assert bias_maxima(scores[0]).shape == (3,)


def test_the_bias_is_read_back_as_it_is() -> None:
    sums, maxima = score_tally(torch.randn(2, 4), torch.tensor([[0], [1]]), kind="logits")
    bias = bias_maxima(torch.tensor([0.25, -0.5, 0.0, 0.25]))
    found = ScoreStatistics.of(sums.tolist(), torch.cat([maxima, bias]).tolist())
    assert found is not None
    assert (found.bias_min, found.bias_max) == (-0.5, 0.25)
    assert found.bias_std == pytest.approx(torch.tensor([0.25, -0.5, 0.0, 0.25]).std(correction=0).item())
    assert bias_maxima(torch.tensor([0.0, math.nan])).tolist() == [NOTHING] * 3


@pytest.mark.parametrize(
    ("scores", "choices", "settings", "words"),
    [
        (torch.rand(3, 4), torch.zeros(2, 1, dtype=torch.int64), {}, r"\[2, 1\] with scores of shape \[3, 4\]"),
        (torch.rand(3, 4), torch.zeros(3, 5, dtype=torch.int64), {}, r"\[3, 5\] with scores of shape \[3, 4\]"),
        (torch.rand(3, 4), torch.zeros(3, 3, dtype=torch.bool), {"top_k": 1}, r"expected \[3, 4\]"),
        (torch.rand(3, 4), torch.zeros(3, 4, dtype=torch.bool), {}, "top_k=None"),
        (torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int64), {}, "two experts"),
        (torch.ones(3, 4, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64), {}, "int64"),
        (torch.rand(3, 4), torch.zeros(3, 1, dtype=torch.int64), {"kind": "logit"}, "'logit'"),
        (torch.rand(3, 4), torch.zeros(3, 1, dtype=torch.int64), {"function": "tanh"}, "'tanh'"),
        (torch.rand(3, 4), torch.zeros(3, 1, dtype=torch.int64), {"function": "sqrtsoftplus"}, "say which"),
    ],
)
def test_a_wrong_argument_is_named(scores: Tensor, choices: Tensor, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        score_tally(scores, choices, **settings)  # type: ignore[arg-type]


def test_a_mask_of_other_tokens_is_refused() -> None:
    with pytest.raises(MaskError, match=r"\[4\] with scores \[3, 4\]"):
        score_tally(torch.rand(3, 4), torch.zeros(3, 1, dtype=torch.int64), valid=torch.ones(4, dtype=torch.bool))


def test_the_vector_is_as_long_as_its_fields() -> None:
    fields = sum_fields(5)
    assert len(fields) == NUM_SUM_FIELDS + 5
    assert len({field.name for field in fields}) == len(fields)
    assert [field.name for field in fields[:2]] == ["score", "entropy"]

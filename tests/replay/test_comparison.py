"""The replay check: right values from public reports, and equality with a slow reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import reference_totals

from moe_telemetry.errors import MaskError, RoutesError
from moe_telemetry.replay import (
    ReplayTotals,
    RowClass,
    classify_rows,
    combine_counts,
    compare_routes,
    compare_rows,
    pooled_agreement,
    previous_rows,
    token_order,
    usable_rows,
)
from moe_telemetry.replay.overlap import (
    _count_shared_by_table,
    _has_repeats_by_pairs,
    _has_repeats_by_table,
    count_shared_by_pairs,
    narrow_ids,
)

DTYPES = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64)
OWN = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [0, 2], [1, 3]])


def _compare(replayed: object, own: object, num_experts: int, **keywords: Any) -> ReplayTotals:
    return compare_routes(torch.as_tensor(replayed), torch.as_tensor(own), num_experts=num_experts, **keywords).totals()


def _distinct_rows(rows: int, num_experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, num_experts, generator=generator).topk(top_k).indices


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_roll_by_one_row_shows_in_zero_overlap_and_agreement(dtype: torch.dtype) -> None:
    comparison = compare_routes(OWN.roll(1, 0).to(dtype), OWN.to(dtype), num_experts=8)
    totals = comparison.totals()
    assert (totals.replayed, totals.checked, totals.zero_overlap, totals.shared) == (6, 6, 5, 0.5)
    assert float(comparison.shared) == 0.5
    assert comparison.zero_overlap_ratio == pytest.approx(0.8333, abs=1e-4)
    assert comparison.agreement == pytest.approx(0.0833, abs=1e-4)


def test_equal_routes_agree_in_every_row() -> None:
    totals = _compare(OWN, OWN, 8)
    assert (totals.replayed, totals.checked, totals.zero_overlap, totals.shared) == (6, 6, 0, 6.0)
    assert totals.agreement == 1.0
    assert totals.chance_corrected_agreement == 1.0


def test_routes_flattened_batch_first_disagree_with_a_sequence_first_router() -> None:
    own = [[0], [2], [1], [3], [0], [0]]
    replayed = [[0], [1], [-1], [2], [3], [-1]]
    bare = _compare(replayed, own, 4, row_stride=2)
    assert (bare.checked, bare.zero_overlap, bare.shared, bare.missing) == (4, 3, 1.0, 2)
    assert (bare.zero_overlap_ratio, bare.agreement) == (0.75, 0.25)
    masked = _compare(replayed, own, 4, row_stride=2, valid=torch.tensor([1, 1, 1, 1, 0, 0]).bool())
    assert (masked.replayed, masked.checked, masked.zero_overlap, masked.shared) == (4, 3, 2, 1.0)
    assert (masked.missing, masked.routed_padding) == (1, 1)


def test_the_copied_last_row_of_a_sample_is_a_placeholder() -> None:
    totals = _compare([[0, 1], [2, 3], [2, 3]], [[0, 1], [2, 3], [4, 5]], 6)
    assert (totals.replayed, totals.checked, totals.zero_overlap, totals.shared) == (3, 2, 0, 2.0)
    assert (totals.placeholder, totals.fallback, totals.longest_equal_run) == (1, 0, 2)


A_ROWS, B_ROWS = [[0, 1], [2, 3], [2, 3]], [[6, 7], [0, 2], [0, 2]]
A_OWN, B_OWN = [[0, 1], [2, 3], [4, 5]], [[6, 7], [0, 2], [1, 3]]


@pytest.mark.parametrize("layout", ["bsh", "sbh", "packed"])
def test_placeholders_are_judged_in_token_order_of_their_own_sequence(layout: Any) -> None:
    replayed, own = torch.tensor([A_ROWS, B_ROWS]), torch.tensor([A_OWN, B_OWN])
    if layout == "sbh":
        replayed, own = replayed.transpose(0, 1), own.transpose(0, 1)
    starts = [0, 3] if layout == "packed" else None
    order = token_order(layout, num_rows=6, batch_size=2, sequence_starts=starts)
    totals = _compare(replayed.reshape(6, 2), own.reshape(6, 2), 8, **order._asdict())
    assert (totals.checked, totals.zero_overlap, totals.placeholder) == (4, 0, 2)


def test_flat_order_would_miss_the_placeholders_of_a_sequence_first_batch() -> None:
    replayed = torch.tensor([A_ROWS, B_ROWS]).transpose(0, 1).reshape(6, 2)
    own = torch.tensor([A_OWN, B_OWN]).transpose(0, 1).reshape(6, 2)
    totals = _compare(replayed, own, 8)
    assert (totals.checked, totals.zero_overlap) == (6, 2)


def test_a_row_equal_to_the_end_of_another_sequence_is_checked() -> None:
    rows = [[0, 1], [2, 3], [2, 3], [4, 5]]
    for starts in (torch.tensor([0, 2]), torch.tensor([0, 2, 4]), [0, 2], torch.tensor([1, 0, 1, 0]).bool()):
        assert _compare(rows, rows, 8, sequence_starts=starts).placeholder == 0
    assert _compare(rows, rows, 8).placeholder == 1


def test_a_row_after_padding_starts_a_sequence() -> None:
    rows = [[0, 1], [0, 1], [0, 1]]
    totals = _compare(rows, rows, 8, valid=torch.tensor([False, True, True]))
    assert (totals.checked, totals.placeholder, totals.routed_padding) == (1, 1, 1)


def test_a_repeated_id_is_padding_or_a_hole() -> None:
    own = OWN.clone()
    replayed = own.clone()
    replayed[3] = torch.tensor([3, 3])
    totals = _compare(replayed, own, 8)
    assert (totals.replayed, totals.checked, totals.zero_overlap, totals.shared) == (6, 5, 0, 5.0)
    assert (totals.repeated, totals.fallback) == (1, 1)


def test_a_capture_of_zeros_is_no_coverage_and_never_no_mismatch() -> None:
    zeros = torch.zeros(100, 2, dtype=torch.uint8)
    comparison = compare_routes(zeros, _distinct_rows(100, 8, 2), num_experts=8)
    totals = comparison.totals()
    assert (totals.replayed, totals.checked, totals.coverage, totals.longest_equal_run) == (100, 0, 0.0, 0)
    assert comparison.zero_overlap_ratio is None
    assert comparison.agreement is None
    assert comparison.chance_corrected_agreement is None
    assert totals.exceeds() is None


def test_missing_routes_are_fallback() -> None:
    own = _distinct_rows(10, 16, 2)
    replayed = own.clone()
    replayed[[2, 5, 9]] = -1
    totals = _compare(replayed, own, 16)
    assert (totals.missing, totals.checked, totals.fallback_ratio) == (3, 7, 0.3)
    nothing = _compare(torch.full_like(own, -1), own, 16)
    assert (nothing.fallback_ratio, nothing.checked) == (1.0, 0)


def test_a_partly_valid_row_is_malformed_and_nothing_is_written_to() -> None:
    replayed = torch.tensor([[2, -1, -1], [0, 1, 2]])
    own = torch.tensor([[2, 3, 0], [0, 1, 2]])
    copies = replayed.clone(), own.clone()
    totals = _compare(replayed, own, 4)
    assert (totals.malformed, totals.checked, totals.missing) == (1, 1, 0)
    assert torch.equal(replayed, copies[0])
    assert torch.equal(own, copies[1])


def test_padding_with_distinct_ids_is_left_out_by_the_mask() -> None:
    replayed = torch.tensor([[0, 1], [2, 3]] + [[2, 3]] * 6)
    totals = _compare(replayed, replayed, 4, valid=torch.arange(8) < 2)
    assert (totals.replayed, totals.checked, totals.placeholder) == (2, 2, 0)


def test_wide_unsigned_ids_are_compared_exactly() -> None:
    ids = torch.tensor([[1, 511], [256, 300]]).to(torch.uint16)
    assert _compare(ids, ids.long(), 512).shared == 2.0
    large = torch.tensor([[65_535, 0], [40_000, 65_534]]).to(torch.uint16)
    assert _compare(large, large, 65_536).shared == 2.0
    assert _compare(large, large, 65_535).out_of_range == 1


def test_ids_beyond_the_last_expert_are_counted_not_folded() -> None:
    totals = _compare([[4, 5], [0, 1], [2**40, 1]], [[0, 2], [0, 1], [0, 1]], 4)
    assert (totals.out_of_range, totals.checked, totals.shared) == (2, 1, 1.0)


def test_a_run_of_stale_rows_hides_from_zero_overlap_but_not_from_the_longest_run() -> None:
    own = torch.stack([torch.arange(200), torch.arange(200) + 200], 1)
    replayed = own.clone()
    replayed[100:120] = torch.tensor([400, 401])
    totals = _compare(replayed, own, 512)
    assert (totals.checked, totals.zero_overlap, totals.placeholder, totals.longest_equal_run) == (181, 1, 19, 20)
    assert totals.exceeds() is False


def test_rows_that_a_prefix_cache_dropped_lower_the_coverage() -> None:
    own = _distinct_rows(12, 64, 4)
    replayed = own.clone()
    replayed[:8] = -1
    totals = _compare(replayed, own, 64)
    assert totals.coverage == pytest.approx(4 / 12)
    replayed[11] = replayed[10]
    assert _compare(replayed, own, 64).checked == 3


def test_padding_is_not_in_the_denominator() -> None:
    own = _distinct_rows(200, 64, 2)
    replayed = own.clone()
    replayed[7] = (own[7] + 32) % 64
    totals = _compare(replayed, own, 64, valid=torch.arange(200) < 50)
    assert (totals.zero_overlap_ratio, totals.exceeds(min_checked=50)) == (0.02, True)


@pytest.mark.parametrize(
    ("zero_overlap", "checked", "expected"),
    [(1, 100, False), (2, 100, True), (29, 2900, False), (1, 10, None), (0, 0, None)],
)
def test_one_percent_is_no_finding_and_a_small_sample_is_none(
    zero_overlap: int, checked: int, expected: bool | None
) -> None:
    totals = ReplayTotals(num_experts=64, top_k=2, replayed=checked, checked=checked, zero_overlap=zero_overlap)
    assert totals.exceeds() is expected


@pytest.mark.parametrize(
    ("num_experts", "top_k", "zero_overlap", "agreement"),
    [
        (128, 8, 0.588, 0.0625),
        (256, 8, 0.773, 0.031),
        (64, 6, 0.540, 0.094),
        (512, 22, 0.373, 0.043),
        (32, 4, 0.569, 0.125),
        (8, 2, 0.536, 0.25),
        (16, 8, 0.0001, 0.5),
        (4, 3, 0.0, 0.75),
    ],
)
def test_chance_levels(num_experts: int, top_k: int, zero_overlap: float, agreement: float) -> None:
    totals = ReplayTotals(num_experts=num_experts, top_k=top_k)
    assert totals.chance_zero_overlap == pytest.approx(zero_overlap, abs=6e-4)
    assert totals.chance_agreement == pytest.approx(agreement, abs=6e-4)
    assert totals.blind is (zero_overlap < 0.05)


def test_zero_overlap_is_blind_where_k_is_large_against_e_and_agreement_is_near_chance() -> None:
    own, replayed = _distinct_rows(4000, 4, 3, seed=1), _distinct_rows(4000, 4, 3, seed=2)
    comparison = compare_routes(replayed, own, num_experts=4)
    assert comparison.blind
    assert comparison.zero_overlap_ratio == 0
    assert comparison.agreement == pytest.approx(0.75, abs=0.01)
    assert comparison.chance_corrected_agreement == pytest.approx(0, abs=0.05)


def test_all_experts_chosen_leaves_no_chance_corrected_agreement() -> None:
    totals = _compare([[0, 1]], [[1, 0]], 2)
    assert totals.agreement == 1.0
    assert totals.chance_corrected_agreement is None


def test_agreement_over_layers_is_weighted_by_checked_rows() -> None:
    layers = [
        ReplayTotals(num_experts=8, top_k=2, checked=100, shared_experts=198),
        ReplayTotals(num_experts=8, top_k=4, checked=300, shared_experts=1164),
        ReplayTotals(num_experts=8, top_k=2),
    ]
    assert pooled_agreement(layers) == pytest.approx((99 + 291) / 400)
    assert pooled_agreement([]) is None


def test_ties_at_the_boundary_are_forgiven_by_scores_only() -> None:
    scores = torch.tensor([[3.0, 2.0, 2.0, 1.0], [3.0, 2.0, 1.0, 0.0]])
    own, replayed = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 2], [2, 0]])
    comparison = compare_routes(replayed, own, num_experts=4, scores=scores)
    assert comparison.agreement == 0.5
    assert comparison.tie_tolerant_agreement == 0.75
    assert compare_routes(replayed, own, num_experts=4).tie_tolerant_agreement is None


def test_a_dropped_own_choice_does_not_lower_the_boundary() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0]])
    comparison = compare_routes(torch.tensor([[0, 2]]), torch.tensor([[1, -1]]), num_experts=3, scores=scores)
    assert comparison.tie_tolerant_agreement == 0.5


@pytest.mark.parametrize("top_k", [1, 2, 8, 30])
def test_nothing_is_read_from_the_device(top_k: int) -> None:
    def on_meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    comparison = compare_routes(
        on_meta(12, top_k, dtype=torch.int32),
        on_meta(12, top_k),
        num_experts=64,
        valid=on_meta(12, dtype=torch.bool),
        sequence_starts=on_meta(3),
        row_stride=3,
        scores=on_meta(12, 64, dtype=torch.bfloat16),
    )
    assert comparison.checked.is_meta
    assert comparison.checked.shape == ()
    total = combine_counts(on_meta(13), comparison.vector)
    assert total.is_meta
    count_shared_by_pairs(on_meta(top_k, 12, dtype=torch.int16), on_meta(top_k, 12, dtype=torch.int16))
    _has_repeats_by_pairs(on_meta(top_k, 12, dtype=torch.int16))
    previous_rows(12, sequence_starts=on_meta(3), device="meta")


def test_counts_accumulate_as_one_comparison_of_all_rows() -> None:
    own = _distinct_rows(64, 16, 4)
    replayed = own.clone()
    replayed[10:14] = replayed[9]
    replayed[40] = -1
    halves = [
        compare_routes(replayed[part], own[part], num_experts=16).vector for part in (slice(0, 32), slice(32, 64))
    ]
    together = compare_routes(replayed, own, num_experts=16, sequence_starts=[0, 32])
    assert torch.equal(combine_counts(*halves), together.vector)
    added = ReplayTotals.from_vector(halves[0].tolist(), num_experts=16, top_k=4) + ReplayTotals.from_vector(
        halves[1].tolist(), num_experts=16, top_k=4
    )
    assert added == together.totals()


def test_rows_used_as_given_are_checked_or_placeholders() -> None:
    replayed = torch.tensor([[0, 1], [0, 1], [2, 2], [1, 9], [-1, 3], [-1, -1], [4, 5], [-1, -1]])
    valid = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]).bool()
    classes = classify_rows(replayed, num_experts=8, valid=valid)
    assert [RowClass(code).name for code in classes.tolist()] == [
        "CHECKED",
        "PLACEHOLDER",
        "REPEATED",
        "OUT_OF_RANGE",
        "MALFORMED",
        "MISSING",
        "ROUTED_PADDING",
        "PADDING",
    ]
    assert usable_rows(classes).tolist() == [True, True] + [False] * 6
    rows = compare_rows(replayed, replayed, num_experts=8, valid=valid)
    assert torch.equal(rows.usable_T, usable_rows(classes))
    assert rows.shared_T[:2].tolist() == [2, 2]


def test_the_row_before_in_each_layout() -> None:
    assert previous_rows(6, **token_order("sbh", num_rows=6, batch_size=2)._asdict()).tolist() == [-1, -1, 0, 1, 2, 3]
    assert previous_rows(6, **token_order("bsh", num_rows=6, batch_size=2)._asdict()).tolist() == [-1, 0, 1, -1, 3, 4]
    packed = token_order("packed", num_rows=6, sequence_starts=[0, 1, 4])
    assert previous_rows(6, **packed._asdict()).tolist() == [-1, -1, 1, 2, -1, 4]
    assert previous_rows(3).tolist() == [-1, 0, 1]


def test_no_rows_count_nothing() -> None:
    nothing = torch.empty(0, 2, dtype=torch.int64)
    totals = _compare(nothing, nothing, 8, valid=torch.empty(0, dtype=torch.bool), row_stride=3)
    assert (totals.replayed, totals.longest_equal_run, totals.coverage) == (0, 0, None)


@pytest.mark.parametrize(
    ("replayed", "own", "keywords", "message"),
    [
        (OWN, OWN[:5], {}, r"\(6, 2\), own \(5, 2\)"),
        (OWN, OWN[:, :1], {}, r"\(6, 2\), own \(6, 1\)"),
        (OWN.float(), OWN, {}, "float32"),
        (OWN[None], OWN, {}, r"\(1, 6, 2\)"),
        (OWN, OWN, {"num_experts": 1}, "2 experts a row"),
        (OWN, OWN, {"row_stride": 0}, "row_stride=0"),
        (OWN, OWN, {"scores": torch.zeros(6, 7)}, r"\(6, 7\)"),
        (OWN, OWN, {"sequence_starts": torch.ones(5).bool()}, r"\(5,\)"),
        (OWN, OWN, {"sequence_starts": torch.ones(5)}, "float32"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(
    replayed: torch.Tensor, own: torch.Tensor, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(RoutesError, match=message):
        compare_routes(replayed, own, **{"num_experts": 8, **keywords})


def test_a_mask_that_does_not_fit_is_an_error_with_both_shapes() -> None:
    with pytest.raises(MaskError, match=r"\(5,\).*\(6,\)"):
        compare_routes(OWN, OWN, num_experts=8, valid=torch.ones(5, dtype=torch.bool))
    with pytest.raises(MaskError, match=r"torch\.int64"):
        compare_routes(OWN, OWN, num_experts=8, valid=torch.ones(6, dtype=torch.int64))


def test_an_unknown_layout_and_broken_batches_are_errors() -> None:
    with pytest.raises(RoutesError, match="thd"):
        token_order("thd", num_rows=6)  # type: ignore[arg-type]
    with pytest.raises(RoutesError, match="batch_size=4"):
        token_order("bsh", num_rows=6, batch_size=4)


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    top_k = draw(st.integers(1, 4))
    num_experts = draw(st.integers(top_k, 6))
    rows = draw(st.integers(1, 14))
    ids = st.integers(-2, num_experts + 1)
    own = [draw(st.permutations(range(num_experts)))[:top_k] for _ in range(rows)]
    replayed = [
        draw(st.one_of(st.just(own[row]), st.just(own[row - 1]), st.lists(ids, min_size=top_k, max_size=top_k)))
        for row in range(rows)
    ]
    return {
        "replayed": replayed,
        "own": own,
        "num_experts": num_experts,
        "valid": draw(st.none() | st.lists(st.booleans(), min_size=rows, max_size=rows)),
        "starts": draw(st.lists(st.integers(0, rows - 1), max_size=3)),
        "row_stride": draw(st.integers(1, 4)),
        "scores": draw(
            st.none()
            | st.lists(
                st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=num_experts, max_size=num_experts),
                min_size=rows,
                max_size=rows,
            )
        ),
    }


@given(case=_cases(), dtype=st.sampled_from([torch.int8, torch.int16, torch.int32, torch.int64]))
@settings(max_examples=300)
def test_the_fast_check_equals_the_slow_one(case: dict[str, Any], dtype: torch.dtype) -> None:
    valid, scores = case["valid"], case["scores"]
    totals = _compare(
        torch.tensor(case["replayed"]).to(dtype),
        torch.tensor(case["own"]),
        case["num_experts"],
        valid=None if valid is None else torch.tensor(valid),
        sequence_starts=torch.tensor(case["starts"], dtype=torch.int64),
        row_stride=case["row_stride"],
        scores=None if scores is None else torch.tensor(scores),
    )
    assert totals == reference_totals(**case)


@given(rows=st.integers(1, 40), top_k=st.integers(1, 12), spare=st.integers(0, 40), seed=st.integers(0, 2**16))
@settings(max_examples=60)
def test_pairs_and_table_count_alike(rows: int, top_k: int, spare: int, seed: int) -> None:
    num_experts = top_k + spare
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, num_experts, (rows, top_k), generator=generator)
    own = _distinct_rows(rows, num_experts, top_k, seed)
    narrow, narrow_own = narrow_ids(chosen, num_experts), narrow_ids(own, num_experts)
    by_pairs = count_shared_by_pairs(narrow.ids_KT, narrow_own.ids_KT)
    assert torch.equal(by_pairs, _count_shared_by_table(narrow, narrow_own))
    assert torch.equal(_has_repeats_by_pairs(narrow.ids_KT), _has_repeats_by_table(narrow))
    assert by_pairs.tolist() == [
        sum(expert in row_own for expert in row) for row, row_own in zip(chosen.tolist(), own.tolist(), strict=True)
    ]

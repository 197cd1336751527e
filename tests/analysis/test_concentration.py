"""Concentration: counts against a plain recount, baselines, hot experts from step to step, and drift."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moe_telemetry import ConfigError, RouterKey, TraceError
from moe_telemetry.analysis import Concentration, concentration, drift, read_trace
from moe_telemetry.analysis.inventory import take_inventory
from moe_telemetry.testing import make_trace
from moe_telemetry.trace.reader import open_trace
from tests.analysis.trace_files import DECODER, call, write_trace


def _recount(folder: Path) -> dict[RouterKey, Counter[int]]:
    """Count expert ids of real tokens one by one."""
    counts: dict[RouterKey, Counter[int]] = {}
    trace = open_trace(folder)
    for row in (row for chunk in trace.chunks() for row in trace.rows(chunk)):
        real = row.expert_ids if row.valid is None else row.expert_ids[row.valid]
        counts.setdefault(row.key, Counter()).update(real.ravel().tolist())
    return counts


def test_assignments_are_those_of_a_plain_recount(tmp_path: Path) -> None:
    make_trace(tmp_path, num_steps=5, num_microbatches=2, token_groups=(0, 0, 2), num_padding=7, num_experts=40)
    result = concentration(tmp_path)
    recounted = _recount(tmp_path)
    assert [layer.router for layer in result.layers] == list(recounted)
    for layer in result.layers:
        assert dict(enumerate(layer.assignments)) == {expert: recounted[layer.router][expert] for expert in range(40)}
        # two groups of ranks, five steps, two microbatches, 64 tokens of which 7 are padding
        assert (layer.tokens, layer.padding_tokens, layer.num_calls, layer.num_steps) == (1140, 140, 20, 5)
        assert sum(layer.assignments) == 2 * layer.tokens


def test_coverage_counts_the_hottest_first(tmp_path: Path) -> None:
    write_trace(tmp_path, [call([[0, 1], [0, 2], [0, 1], [0, 3]])], num_experts=4)
    (layer,) = concentration(tmp_path, top=1).layers
    assert layer.assignments == (4, 2, 1, 1)
    assert layer.coverage_curve == (0.5, 0.75, 0.875, 1.0)
    assert (layer.coverage(), layer.coverage(2), layer.uniform()) == (0.5, 0.75, 0.25)
    assert layer.coverage_over_uniform == 2.0
    assert layer.hottest(2) == (0, 1)
    assert layer.unique_experts == 4


def test_the_baseline_is_that_of_the_experts_that_the_model_has(tmp_path: Path) -> None:
    make_trace(tmp_path, num_experts=128, top_k=8)
    assert concentration(tmp_path).layers[0].uniform(8) == 0.0625


def test_what_is_no_choice_of_an_expert_is_counted_apart(tmp_path: Path) -> None:
    write_trace(tmp_path, [call([[0, -1], [7, 5], [2, 0]], valid=[True, True, False])], num_experts=6)
    (layer,) = concentration(tmp_path).layers
    assert layer.assignments == (1, 0, 0, 0, 0, 1)
    assert (layer.tokens, layer.padding_tokens, layer.unmade, layer.invalid) == (2, 1, 1, 1)


def test_tokens_beyond_the_limit_of_the_capture_are_told(tmp_path: Path) -> None:
    write_trace(tmp_path, [call(np.zeros((1000, 1)), num_tokens=8192)])
    (layer,) = concentration(tmp_path).layers
    assert (layer.tokens, layer.tokens_not_kept) == (1000, 7192)


def test_layers_come_in_the_order_of_numbers_and_blocks_stay_apart(tmp_path: Path) -> None:
    keys = [RouterKey("decoder", layer) for layer in (*range(1, 12),)] + [RouterKey("mtp0", 2)]
    write_trace(tmp_path, [call([[0]], key) for key in reversed(keys)])
    assert [layer.router for layer in concentration(tmp_path).layers] == keys


def test_stages_never_mix(tmp_path: Path) -> None:
    write_trace(tmp_path, [call([[0]]), call([[1], [1]], stage="eval"), call([[2]], microbatch=1)])
    loads = {layer.stage: layer.assignments[:3] for layer in concentration(tmp_path).layers}
    assert loads == {"eval": (0, 2, 0), "train": (1, 0, 1)}
    (only,) = concentration(tmp_path, stage="eval").layers
    assert only.assignments[:3] == (0, 2, 0)


def test_decode_tokens_are_those_that_are_a_sequence_of_their_own(tmp_path: Path) -> None:
    calls = [
        call([[0], [1], [2], [3]], sequence_starts=[0, 1, 3]),  # 0 and 3 decode, 1 and 2 are a prompt
        call([[4], [5]], sequence_starts=[0, 1], num_tokens=3, microbatch=1),  # the last one goes on beyond the limit
        call([[6], [7]], sequence_starts=[0, 1], valid=[True, False], microbatch=2),
        call([[1], [1]], microbatch=3),
    ]
    (layer,) = concentration(write_trace(tmp_path, calls), decode=True).layers
    assert layer.assignments == (1, 0, 0, 1, 1, 0, 1, 0)
    assert (layer.tokens, layer.padding_tokens) == (4, 1)


@pytest.mark.parametrize(
    ("steps", "expected"), [((None, None), 5), ((1, 3), 2), ((3, None), 2), ((None, 1), 1), ((-5, 99), 5)]
)
def test_steps_are_taken_from_the_first_up_to_the_last(
    steps: tuple[int | None, int | None], expected: int, tmp_path: Path
) -> None:
    make_trace(tmp_path, num_steps=5, num_layers=1, steps_per_row_group=2)
    (layer,) = concentration(tmp_path, steps=steps).layers
    assert (layer.num_steps, layer.tokens) == (expected, 64 * expected)


def _hot_steps(folder: Path, *hot: tuple[int, ...], steps: tuple[int, ...] | None = None) -> Concentration:
    numbers = steps or tuple(range(len(hot)))
    calls = [call([[expert] for expert in experts], step=step) for step, experts in zip(numbers, hot, strict=True)]
    return concentration(write_trace(folder, calls), top=2)


@pytest.mark.parametrize(
    ("hot", "overlap", "possible", "by_chance"),
    [
        (((0, 1), (0, 2), (3, 4)), 1, 4, 8),
        (((0, 1), (1, 0)), 2, 2, 4),
        # of three experts the two with most load; of equal ones the lower id
        (((5, 5, 6, 6, 7), (5, 6, 7)), 2, 2, 4),
        # one expert has all load: there is no second hot one, and expert 0 is none
        (((7, 7), (7, 7), (7, 3)), 2, 3, 3),
    ],
)
def test_hot_experts_are_followed_from_step_to_step(
    hot: tuple[tuple[int, ...], ...], overlap: int, possible: int, by_chance: int, tmp_path: Path
) -> None:
    (layer,) = _hot_steps(tmp_path, *hot).layers
    assert (layer.hot_overlap, layer.hot_possible, layer.hot_by_chance) == (overlap, possible, by_chance)
    assert layer.persistence == overlap / possible
    assert layer.chance_persistence == by_chance / (8 * possible)


def test_steps_are_followed_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    # as captured: 10, 9, 2; in order 2 {0, 1}, 9 {0, 1}, 10 {4, 5}
    (layer,) = _hot_steps(tmp_path, (4, 5), (0, 1), (1, 0), steps=(10, 9, 2)).layers
    assert (layer.hot_overlap, layer.hot_possible) == (2, 4)


def test_one_step_has_no_persistence(tmp_path: Path) -> None:
    (layer,) = _hot_steps(tmp_path, (0, 1)).layers
    assert (layer.persistence, layer.chance_persistence) == (None, None)


def test_an_eighth_of_the_experts_are_hot_unless_told(tmp_path: Path) -> None:
    make_trace(tmp_path / "many", num_experts=64)
    make_trace(tmp_path / "few", num_experts=4)
    assert {layer.top for layer in concentration(tmp_path / "many").layers} == {8}
    assert {layer.top for layer in concentration(tmp_path / "few").layers} == {1}
    assert {layer.top for layer in concentration(tmp_path / "many", top=64).layers} == {64}


def test_a_layer_without_a_real_token_has_no_ratio(tmp_path: Path) -> None:
    other = RouterKey("decoder", 1)
    write_trace(tmp_path, [call([[0]]), call([[1]], other, valid=[False])])
    layer = concentration(tmp_path).layers[1]
    assert (layer.router, layer.tokens, layer.padding_tokens) == (other, 0, 1)
    assert (layer.coverage_curve, layer.coverage(), layer.coverage_over_uniform, layer.hottest(3)) == (
        None,
        None,
        None,
        (),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": "rollout"}, "--stage rollout leaves no token: .* has steps 0 to 3 of train"),
        ({"steps": (9, None)}, "--steps 9: leaves no token"),
        ({"decode": True, "stage": "train"}, "--stage train --decode leaves no token"),
    ],
)
def test_a_selection_that_leaves_nothing_says_what_there_is(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    make_trace(tmp_path)
    with pytest.raises(TraceError, match=message):
        concentration(tmp_path, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top": 17}, "top=17: expected 1 to 16, the experts of the smallest router"),
        ({"top": 0}, "top=0: expected 1 to 16"),
        ({"steps": (5, 2)}, r"steps=\(5, 2\): expected a first step below the one that is left out again"),
        ({"workers": 0}, "workers=0: expected 1 or more"),
        ({"engine": "spark"}, "engine='spark': expected 'local' or 'ray'"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    make_trace(tmp_path)
    with pytest.raises(ConfigError, match=message):
        concentration(tmp_path, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("read", [concentration, take_inventory, read_trace])
def test_a_trace_whose_parts_have_no_row_says_so(read: Callable[[Path], object], tmp_path: Path) -> None:
    write_trace(tmp_path, [call([[0]])])
    part = tmp_path / "routes-00000-000000.parquet"
    pq.write_table(pq.read_table(part).slice(0, 0), part)
    with pytest.raises(TraceError, match=f"{tmp_path} has no router call"):
        read(tmp_path)


@pytest.mark.parametrize("top", [0, -1, 17])
def test_the_coverage_of_experts_that_there_are_not_is_refused(top: int, tmp_path: Path) -> None:
    layer = concentration(make_trace(tmp_path)).layers[0]
    with pytest.raises(ConfigError, match=rf"coverage\({top}\): expected 1 to 16, the experts of decoder.0"):
        layer.coverage(top)


def test_a_trace_without_routes_yet_says_so(tmp_path: Path) -> None:
    make_trace(tmp_path, num_steps=0)
    with pytest.raises(TraceError, match="has manifests and no routes yet"):
        concentration(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"top_k": 3}, "expert_ids that are not top_k a token"),
        ({"top_k": 0}, r"routes-00000-000000\.parquet has a row with top_k below 1"),
        ({"num_tokens": 1}, "fewer num_tokens than tokens"),
        ({"valid": [True]}, "a mask of another length than its tokens"),
        ({"sequence_starts": [-1, 0]}, "a sequence that begins before its first token"),
        ({"layer": 9}, "has routes of decoder.9, which its manifests do not name"),
    ],
)
def test_a_row_that_does_not_fit_itself_is_refused(row: dict[str, object], message: str, tmp_path: Path) -> None:
    write_trace(tmp_path, [{**call([[0, 1], [2, 3]]), **row}], keys=[DECODER])
    with pytest.raises(TraceError, match=message):
        concentration(tmp_path, decode=True)


def test_the_drift_of_a_trace_from_itself_is_none(tmp_path: Path) -> None:
    result = concentration(make_trace(tmp_path))
    assert [
        (layer.total_variation, layer.jensen_shannon, layer.hot_overlap) for layer in drift(result, result).layers
    ] == [(0.0, 0.0, 1.0)] * 3


def test_the_drift_between_known_loads(tmp_path: Path) -> None:
    before = write_trace(tmp_path / "before", [call([[0], [0], [1], [1]])], num_experts=4)
    after = write_trace(tmp_path / "after", [call([[1], [2]])], num_experts=4)
    (layer,) = drift(concentration(before, top=2), concentration(after, top=2)).layers
    # half of the load is of expert 1 in both; the other half has gone from 0 to 2
    assert (layer.total_variation, layer.jensen_shannon, layer.hot_overlap) == (0.5, 0.5, 0.5)


def test_loads_with_nothing_in_common_drift_by_one(tmp_path: Path) -> None:
    before = write_trace(tmp_path / "before", [call([[0], [1]])])
    after = write_trace(tmp_path / "after", [call([[2], [3], [3]])])
    (layer,) = drift(concentration(before), concentration(after)).layers
    assert (layer.total_variation, layer.jensen_shannon, layer.hot_overlap) == (1.0, 1.0, 0.0)


def test_routers_of_one_trace_alone_are_noted_and_none_in_common_is_an_error(tmp_path: Path) -> None:
    one, more, other = (
        concentration(make_trace(tmp_path / name, keys=[RouterKey("decoder", layer) for layer in layers]))
        for name, layers in (("one", (1, 2)), ("more", (1, 2, 3)), ("other", (7,)))
    )
    assert drift(one, more).notes == (f"only in {tmp_path / 'more'}: decoder.3 (train)",)
    with pytest.raises(TraceError, match=r"no router and stage in common: .* has decoder\.1 .*; .* has decoder\.7"):
        drift(one, other)


def test_traces_of_other_experts_do_not_drift(tmp_path: Path) -> None:
    one, other = (concentration(make_trace(tmp_path / str(count), num_experts=count)) for count in (16, 32))
    with pytest.raises(TraceError, match=r"decoder\.0 has 16 experts in one trace and 32 in the other"):
        drift(one, other)


def test_steps_split_over_parts_and_ranks_give_the_same_numbers(tmp_path: Path) -> None:
    calls = [
        call(np.random.default_rng(step * 10 + part).integers(8, size=(5, 2)), step=step, microbatch=part)
        for step, part in itertools.product(range(6), range(3))
    ]
    results = [
        concentration(write_trace(tmp_path / str(size), calls, calls_per_part=size)).layers for size in (1, 4, 100)
    ]
    assert results[0] == results[1] == results[2]

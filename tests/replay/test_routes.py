"""Routes as a value: joined, packed, laid out, cut for ranks, written and read back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from moe_telemetry.errors import RoutesError
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay import Routes, compare_routes

KEYS = (RouterKey("decoder", 1), RouterKey("decoder", 2))


def _routes(*lengths: int, first: int = 0, **fields: Any) -> Routes:
    """Return routes in which row t has the ids 4 * (first + t) + layer * 2 + k."""
    rows = first + torch.arange(sum(lengths))
    ids = 4 * rows[:, None, None] + torch.arange(4).view(1, 2, 2)
    return Routes(ids, lengths, KEYS, **fields)


def _rows(ids: torch.Tensor) -> list[int]:
    """Return which row of `_routes` each row is, -1 where it is missing."""
    return [-1 if row[0, 0] < 0 else int(row[0, 0]) // 4 for row in ids.flatten(0, -3)]


def test_routes_keep_a_copy_and_are_frozen() -> None:
    ids = torch.zeros(3, 2, 2, dtype=torch.int32)
    routes = Routes(ids, (3,), KEYS)
    ids.fill_(7)
    assert int(routes.ids.max()) == 0
    with pytest.raises(AttributeError):
        routes.num_experts = 3  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.uint32, torch.int64])
def test_ids_of_any_integer_dtype_are_taken(dtype: torch.dtype) -> None:
    ids = torch.tensor([[[1, 100]]]).to(dtype)
    assert Routes(ids, (1,), KEYS[:1]).ids.tolist() == [[[1, 100]]]


@pytest.mark.parametrize(
    ("ids", "fields", "message"),
    [
        (torch.zeros(3, 2, 2), {}, "float32"),
        (torch.zeros(3, 2, dtype=torch.int64), {}, r"\(3, 2\)"),
        (torch.zeros(3, 2, 2, dtype=torch.int64), {"sequence_lengths": (2, 2)}, "add up to 4, the ids have 3"),
        (torch.zeros(3, 2, 2, dtype=torch.int64), {"sequence_lengths": (3, 0)}, "1 or more"),
        (torch.zeros(3, 2, 2, dtype=torch.int64), {"keys": KEYS[:1]}, "1 router keys for 2 layers"),
        (torch.zeros(3, 2, 2, dtype=torch.int64), {"keys": KEYS[:1] * 2}, "1 router keys for 2 layers"),
        (torch.zeros(3, 2, 2, dtype=torch.int64), {"num_experts": 1}, "num_experts=1"),
        (torch.full((3, 2, 2), 65_536), {}, "65536"),
        (torch.zeros(0, 2, 2, dtype=torch.int64), {"sequence_lengths": (0,)}, "1 or more"),
    ],
)
def test_fields_that_do_not_fit_are_one_clear_error(ids: torch.Tensor, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RoutesError, match=message):
        Routes(ids, **{"sequence_lengths": (3,), "keys": KEYS, **fields})


@pytest.mark.parametrize(
    ("start", "delta", "expected"),
    [
        (5, _routes(3, first=5), [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, _routes(4, first=14), [0, 1, 2, 3, 14, 15, 16, 17]),
        (6, _routes(3, first=6), [0, 1, 2, 3, 4, -1, 6, 7, 8]),
    ],
)
def test_a_delta_is_placed_at_its_start_and_holds_over_the_boundary(
    start: int, delta: Routes, expected: list[int]
) -> None:
    joined = Routes.join([_routes(5), delta], starts=[0, start])
    assert _rows(joined.ids) == expected
    assert joined.sequence_lengths == (len(expected),)


def test_a_gap_between_turns_lowers_the_coverage() -> None:
    joined = Routes.join([_routes(5), _routes(3, first=6)], starts=[0, 6])
    own = _routes(9).ids[:, 0]
    assert compare_routes(joined.ids[:, 0], own, num_experts=64).coverage == pytest.approx(8 / 9)


def test_the_missing_last_row_of_a_turn_comes_from_the_next_and_never_hides_a_route() -> None:
    first = Routes(torch.cat([_routes(2).ids, torch.full((1, 2, 2), -1)]), (3,), KEYS)
    assert _rows(Routes.join([first, _routes(2, first=2)], starts=[0, 2]).ids) == [0, 1, 2, 3]
    late = Routes(torch.cat([torch.full((1, 2, 2), -1), _routes(1, first=3).ids]), (2,), KEYS)
    assert _rows(Routes.join([_routes(3), late], starts=[0, 2]).ids) == [0, 1, 2, 3]


def test_turns_after_an_aborted_one_are_not_joined_without_their_place() -> None:
    assert _rows(Routes.join([_routes(2), None, _routes(2, first=7)]).ids) == [0, 1]
    assert _rows(Routes.join([_routes(2), None, _routes(2, first=7)], starts=[0, 2, 4]).ids) == [0, 1, -1, -1, 7, 8]
    assert _rows(Routes.join([_routes(2), _routes(2, first=2)]).ids) == [0, 1, 2, 3]


def test_turns_that_cannot_be_joined_are_errors() -> None:
    other = Routes(torch.zeros(2, 1, 2, dtype=torch.int64), (2,), KEYS[:1])
    for turns, starts, message in [
        ([None], None, "nothing to join"),
        ([], None, "nothing to join"),
        ([_routes(2), other], None, "2 routers with K=2 and of 1 routers"),
        ([_routes(2)], [0, 1], "2 starts for 1 turns"),
        ([_routes(2)], [-1], "token -1"),
        ([_routes(1, 1)], None, "2 sequences"),
        ([_routes(2), _routes(2)], [0, 2**40], "at most"),
        ([_routes(2), _routes(2, num_experts=9)], None, "num_experts=None"),
    ]:
        with pytest.raises(RoutesError, match=message):
            Routes.join(turns, starts=starts)


def test_samples_are_packed_one_after_another() -> None:
    packed = Routes.concat([_routes(2, 1), _routes(3, first=3, suspicions=("odd",))])
    assert packed.sequence_lengths == (2, 1, 3)
    assert _rows(packed.ids) == [0, 1, 2, 3, 4, 5]
    assert packed.suspicions == ("odd",)
    assert packed.sequence_starts().tolist() == [0, 2, 3]


def test_the_layouts_hold_the_same_rows() -> None:
    routes = _routes(3, 2)
    assert _rows(routes.to_layout("packed")) == [0, 1, 2, 3, 4]
    assert _rows(routes.to_layout("bsh")) == [0, 1, 2, 3, 4, -1]
    assert routes.to_layout("bsh").shape == (2, 3, 2, 2)
    assert _rows(routes.to_layout("sbh")) == [0, 3, 1, 4, 2, -1]
    assert routes.to_layout("sbh").shape == (3, 2, 2, 2)
    assert _rows(routes.to_layout("bsh", padding_side="left")) == [0, 1, 2, -1, 3, 4]
    assert _rows(routes.to_layout("bsh", length=4)) == [0, 1, 2, -1, 3, 4, -1, -1]
    assert routes.to_layout("sbh", multiple_of=4).shape == (4, 2, 2, 2)


def test_alignment_padding_by_the_wrong_parallel_size_is_an_error_with_both_row_counts() -> None:
    routes = _routes(4, 6)
    aligned = routes.to_layout("packed", multiple_of=4, num_rows=12)
    assert _rows(aligned) == [*range(10), -1, -1]
    with pytest.raises(RoutesError, match="10 rows .* the router 12"):
        routes.to_layout("packed", multiple_of=2, num_rows=12)


def test_layouts_that_do_not_exist_or_do_not_fit_are_errors() -> None:
    for keywords, message in [
        ({"layout": "thd"}, "thd"),
        ({"layout": "bsh", "length": 2}, "longest sequence, 3"),
        ({"layout": "bsh", "multiple_of": 0}, "multiple_of=0"),
        ({"layout": "bsh", "padding_side": "top"}, "top"),
        ({"layout": "bsh", "length": 2**40}, "at most"),
    ]:
        with pytest.raises(RoutesError, match=message):
            _routes(3).to_layout(**keywords)


def test_context_parallel_slices_contiguous_and_zigzag() -> None:
    routes = _routes(8)
    assert [_rows(routes.for_rank(rank, 2).ids) for rank in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    zigzag = [routes.for_rank(rank, 2, order="zigzag") for rank in (0, 1)]
    assert [_rows(part.ids) for part in zigzag] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert zigzag[0].sequence_lengths == (4,)
    assert zigzag[0].sequence_starts().tolist() == [0, 2]


def test_a_contiguous_cut_of_zigzag_tokens_shows_in_zero_overlap_of_each_rank() -> None:
    routes = Routes(torch.arange(8).view(8, 1, 1), (8,), KEYS[:1])
    ratios = [
        compare_routes(
            routes.for_rank(rank, 2).ids[:, 0], routes.for_rank(rank, 2, order="zigzag").ids[:, 0], num_experts=8
        ).zero_overlap_ratio
        for rank in (0, 1)
    ]
    assert ratios == [0.5, 1.0]


def test_sequences_that_do_not_divide_are_padded_and_cut_one_by_one() -> None:
    routes = _routes(3, 4)
    assert _rows(routes.for_rank(1, 2).ids) == [2, -1, 5, 6]
    assert _rows(routes.for_rank(0, 2, order="zigzag").ids) == [0, -1, 3, 6]
    for rank, size, order in [(2, 2, "contiguous"), (0, 0, "contiguous"), (0, 1, "snake")]:
        with pytest.raises(RoutesError, match=r"rank|snake"):
            routes.for_rank(rank, size, order=order)  # type: ignore[arg-type]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    size=st.integers(1, 3),
    order=st.sampled_from(["contiguous", "zigzag"]),
)
def test_the_ranks_together_hold_every_row_once(lengths: list[int], size: int, order: Any) -> None:
    routes = _routes(*lengths)
    parts = [routes.for_rank(rank, size, order=order) for rank in range(size)]
    held = [row for part in parts for row in _rows(part.ids) if row >= 0]
    assert sorted(held) == list(range(sum(lengths)))
    assert len({len(part.ids) for part in parts}) == 1


@pytest.mark.parametrize("largest", [9, 40_000, 65_535])
def test_a_file_gives_back_what_was_saved(tmp_path: Path, largest: int) -> None:
    ids = torch.tensor([[[0, largest], [-1, -1]], [[3, 4], [5, 6]], [[-1, 2], [0, 1]]])
    saved = Routes(ids, (2, 1), KEYS, 65_536, ("looks odd",))
    saved.save(tmp_path / "routes.safetensors")
    loaded = Routes.load(tmp_path / "routes.safetensors")
    assert torch.equal(loaded.ids, saved.ids)
    assert loaded.ids.dtype == torch.int32
    assert (loaded.sequence_lengths, loaded.keys, loaded.num_experts) == ((2, 1), KEYS, 65_536)
    assert (loaded.suspicions, loaded.chunks) == (("looks odd",), 1)


def test_small_ids_are_saved_in_two_bytes(tmp_path: Path) -> None:
    routes = _routes(4096)
    routes.save(tmp_path / "routes.safetensors")
    assert (tmp_path / "routes.safetensors").stat().st_size < 4096 * 4 * 2 + 1000


def _write(path: Path, header: Any, ids: torch.Tensor) -> Path:
    save_file({"ids": ids}, path, metadata={"moe_telemetry_routes": json.dumps(header)})
    return path


HEADER = {
    "schema": 1,
    "keys": ["decoder.1", "decoder.2"],
    "sequence_lengths": [3],
    "num_experts": None,
    "suspicions": [],
    "chunks": 1,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"keys": ["nonsense", "decoder.2"]}, "nonsense"),
        ({"keys": 3}, "TypeError"),
        ({"sequence_lengths": [2]}, "add up to 2"),
        ({"sequence_lengths": [1.5, 1.5]}, "numbers"),
        ({"num_experts": "many"}, "numbers"),
        ({"chunks": 9}, "numbers"),
        ({"chunks": [1]}, "numbers"),
    ],
)
def test_a_header_that_does_not_fit_is_one_clear_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = _write(tmp_path / "x.safetensors", {**HEADER, **changes}, torch.zeros(3, 2, 2, dtype=torch.int32))
    with pytest.raises(RoutesError, match=message):
        Routes.load(path)


def test_files_that_are_no_routes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RoutesError, match="no routes file"):
        Routes.load(tmp_path / "missing.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, other)
    with pytest.raises(RoutesError, match="holds no routes"):
        Routes.load(other)
    with pytest.raises(RoutesError, match="F32"):
        Routes.load(_write(tmp_path / "float.safetensors", HEADER, torch.zeros(3, 2, 2)))
    with pytest.raises(RoutesError, match="cannot be written"):
        _routes(2).save(tmp_path / "no" / "such" / "folder.safetensors")


@given(data=st.data())
def test_a_damaged_file_raises_nothing_but_routes_errors(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "routes.safetensors"
    _routes(2, 1).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        loaded = Routes.load(path)
    except RoutesError:
        return
    assert loaded.ids.shape[0] == sum(loaded.sequence_lengths)


def test_a_router_without_routes_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(RoutesError, match=r"decoder\.9; there are decoder\.1, decoder\.2"):
        _routes(2).layer(RouterKey("decoder", 9))


def test_only_payloads_need_numpy_and_only_files_need_safetensors() -> None:
    program = (
        "import sys; sys.modules['safetensors'] = None\n"
        "import moe_telemetry.replay as replay, torch\n"
        "from moe_telemetry.errors import RoutesError\n"
        "assert 'moe_telemetry.replay.engines' not in sys.modules\n"
        "routes = replay.Routes(torch.zeros(1, 1, 1, dtype=torch.int64), (1,), (('decoder', 0),))\n"
        "try: routes.save('x')\n"
        "except RoutesError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "route files need safetensors: pip install safetensors\n"

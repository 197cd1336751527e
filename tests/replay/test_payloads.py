"""What engines send is decoded exactly, or refused with one clear error and little memory."""

from __future__ import annotations

import base64
import io
import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_telemetry.errors import RoutesError
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay import Routes, compare_routes
from moe_telemetry.replay import payloads as payloads_module
from moe_telemetry.replay.payloads import decode_ids, decode_raw

DENSE_FIRST = [RouterKey("decoder", layer) for layer in (1, 2, 3)]
ALL_MOE = [RouterKey("decoder", layer) for layer in range(3)]


def _ids(rows: int, layers: int, top_k: int = 2, dtype: str = "uint8", seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 64, (rows, layers, top_k)).astype(dtype)


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64", ">i4"])
def test_every_form_of_a_payload_gives_the_same_ids(dtype: str) -> None:
    ids = _ids(5, 3, dtype=dtype)
    forms = [ids, ids.tolist(), _npy(ids), _base64(_npy(ids)), _npy(np.asfortranarray(ids)), {"routed_experts": ids}]
    if not dtype.startswith(">"):
        raw = {"data": _base64(ids.tobytes()), "shape": [5, 3, 2], "dtype": dtype}
        forms += [raw, {**raw, "data": ids.tobytes()}]
    for form in forms:
        routes = Routes.from_vllm(form, keys=ALL_MOE)
        assert routes.ids.tolist() == ids.tolist()
        assert routes.ids.dtype == torch.int32


def test_a_payload_without_a_dtype_is_uint8() -> None:
    ids = _ids(4, 3)
    routes = Routes.from_vllm({"data": _base64(ids.tobytes()), "shape": [4, 3, 2]}, keys=ALL_MOE)
    assert routes.ids.tolist() == ids.tolist()


def test_ids_up_to_65_535_survive_exactly() -> None:
    ids = np.array([[[0, 255, 256, 300, 511, 32_767, 32_768, 65_535]]], dtype=np.uint16)
    routes = Routes.from_vllm(_base64(_npy(ids)), num_experts=65_536)
    assert routes.ids[0, 0].tolist() == ids[0, 0].tolist()
    assert routes.suspicions == ()


def test_a_dtype_too_narrow_for_the_experts_is_a_suspicion_and_no_error() -> None:
    ids = np.array([[[200, 1]], [[255, 0]]], dtype=np.uint8)
    routes = Routes.from_numpy(ids, num_experts=512)
    assert routes.ids[0, 0].tolist() == [200, 1]
    assert "uint8" in routes.suspicions[0]
    assert "512 experts" in routes.suspicions[0]
    assert Routes.from_numpy(ids, num_experts=256).suspicions == ()
    assert "int8" in Routes.from_numpy(ids.astype(np.int8), num_experts=256).suspicions[0]


def test_ids_beyond_the_last_expert_are_kept_counted_and_suspected() -> None:
    routes = Routes.from_numpy(np.array([[[4, 5]], [[0, 1]]]), num_experts=4)
    assert routes.suspicions == ("2 of 4 ids are 4 or more, the number of experts",)
    own = torch.tensor([[0, 2], [0, 1]])
    assert int(compare_routes(routes.ids[:, 0], own, num_experts=4).out_of_range) == 1


@pytest.mark.parametrize("payload_layers", [4, 3])
def test_routers_get_their_layers_from_all_layers_or_from_the_routers_alone(payload_layers: int) -> None:
    ids = np.repeat(np.arange(4 - payload_layers, 4)[None, :, None], 5, axis=0)
    routes = Routes.from_numpy(ids, keys=DENSE_FIRST, num_layers=4)
    assert [str(key) for key in routes.keys] == ["decoder.1", "decoder.2", "decoder.3"]
    assert routes.ids[0, :, 0].tolist() == [1, 2, 3]


def test_any_other_layer_count_is_an_error_with_all_numbers() -> None:
    with pytest.raises(RoutesError, match="payload has 5 layers, the model has 4 layers and 3 routers"):
        Routes.from_numpy(_ids(2, 5), keys=DENSE_FIRST, num_layers=4)


def test_an_mtp_router_does_not_take_a_decoder_layers_routes() -> None:
    routes = Routes.from_numpy(_ids(2, 3), keys=[*ALL_MOE, RouterKey("mtp0", 1)])
    assert list(routes.keys) == ALL_MOE


def test_keys_in_any_order_get_their_own_layer() -> None:
    ids = np.arange(3)[None, :, None].repeat(2, axis=0)
    routes = Routes.from_numpy(ids, keys=[ALL_MOE[2], ALL_MOE[0], ALL_MOE[1]])
    assert [routes.layer(RouterKey("decoder", layer))[0, 0].item() for layer in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("rows", [7, 6])
def test_the_last_token_has_a_row_or_is_missing(rows: int) -> None:
    ids = _ids(rows, 3)
    routes = Routes.from_vllm(ids, keys=ALL_MOE, num_tokens=7)
    assert routes.sequence_lengths == (7,)
    assert routes.ids[:rows].tolist() == ids.tolist()
    assert (routes.ids[rows:] == -1).all()


def test_prompt_and_completion_parts_are_one_sequence() -> None:
    prompt, completion = _ids(4, 3, seed=1), _ids(3, 3, seed=2)
    routes = Routes.from_vllm(_base64(_npy(completion)), prompt=_base64(_npy(prompt)), keys=ALL_MOE, num_tokens=8)
    assert routes.ids[:7].tolist() == np.concatenate([prompt, completion]).tolist()
    assert (routes.ids[7] == -1).all()


def test_a_prefill_only_request_has_a_row_for_every_token() -> None:
    assert (Routes.from_vllm(_ids(4, 3), keys=ALL_MOE, num_tokens=4).ids >= 0).all()


def test_a_delta_leaves_the_tokens_before_its_start_missing() -> None:
    routes = Routes.from_vllm(_ids(3, 3), start=5, keys=ALL_MOE, num_tokens=9)
    assert (routes.ids >= 0).all(-1).all(-1).tolist() == [False] * 5 + [True] * 3 + [False]


@pytest.mark.parametrize(("rows", "num_tokens"), [(5, 7), (8, 7)])
def test_a_payload_of_the_wrong_length_is_an_error_with_both_numbers(rows: int, num_tokens: int) -> None:
    with pytest.raises(RoutesError, match=f"{rows} rows .* for {num_tokens} tokens"):
        Routes.from_vllm(_ids(rows, 3), keys=ALL_MOE, num_tokens=num_tokens)


@pytest.mark.parametrize("payload_layers", [4, 3])
@pytest.mark.parametrize("dtype", ["int32", "int16", "uint8"])
def test_sglang_integers_without_a_shape_find_theirs(payload_layers: int, dtype: str) -> None:
    ids = _ids(6, payload_layers, dtype=dtype)
    routes = Routes.from_sglang(
        {"meta_info": {"routed_experts": _base64(ids.tobytes())}},
        top_k=2,
        keys=DENSE_FIRST,
        num_layers=4,
        num_tokens=7,
        dtype=dtype,
    )
    assert routes.ids[:6].tolist() == ids[:, payload_layers - 3 :].tolist()
    assert (routes.ids[6] == -1).all()


def test_a_shapeless_payload_that_fits_no_layer_count_is_an_error() -> None:
    with pytest.raises(RoutesError, match="10 ids of int32; expected whole tokens of 4 layers x 2 or 3 layers x 2"):
        Routes.from_sglang(np.zeros(10, np.int32).tobytes(), top_k=2, keys=DENSE_FIRST, num_layers=4)
    with pytest.raises(RoutesError, match="24 ids of int32; expected 9 tokens or one less"):
        Routes.from_sglang(np.zeros(24, np.int32).tobytes(), top_k=2, keys=DENSE_FIRST, num_layers=4, num_tokens=9)


def test_an_engine_that_was_not_asked_for_routes_says_so() -> None:
    with pytest.raises(RoutesError, match="was not asked"):
        Routes.from_vllm({"routed_experts": None}, keys=ALL_MOE)


def test_physical_ids_become_logical_ids_and_unknown_ones_stay_out_of_range() -> None:
    physical_to_logical = [0, 1, 2, 3, 0, 2]
    routes = Routes.from_vllm(
        np.array([[[4, 5]], [[1, 3]], [[6, 0]]]), num_experts=4, physical_to_logical=physical_to_logical
    )
    assert routes.ids[:, 0].tolist() == [[0, 2], [1, 3], [6, 0]]
    assert "1 of 6 ids are 4 or more" in routes.suspicions[0]


@pytest.mark.parametrize("map_layers", [[1, 2, 3], [0, 1, 2, 3]])
def test_a_map_by_layer_is_taken_by_router(map_layers: list[int]) -> None:
    maps = [[(layer + expert) % 4 for expert in range(4)] for layer in map_layers]
    routes = Routes.from_vllm(
        np.zeros((2, 4, 1), int), keys=DENSE_FIRST, num_layers=4, physical_to_logical=torch.tensor(maps)
    )
    assert routes.ids[0, :, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad_map", [[], [[0, 1], [1, 0]], [0.5, 1.0], np.zeros((1, 1, 1), int)])
def test_a_map_that_does_not_fit_is_an_error(bad_map: Any) -> None:
    with pytest.raises(RoutesError, match="physical_to_logical"):
        Routes.from_vllm(_ids(2, 3), keys=ALL_MOE, physical_to_logical=bad_map)


def test_the_wrong_dtype_shows_in_impossible_ids() -> None:
    content = np.ones(12, np.float32).tobytes()
    with pytest.raises(RoutesError, match=r"1065353216.*is the dtype of the payload right"):
        Routes.from_sglang(content, top_k=2, keys=ALL_MOE)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "begins with"),
        ("!!!", "not base64"),
        (_npy(_ids(4, 3))[:-1], "holds 23 ids"),
        (_npy(_ids(4, 3, dtype="int32"))[:-1], "truncated"),
        (_npy(_ids(4, 3))[:20], "header cannot be read"),
        (_npy(np.zeros((2, 2))), "float64"),
        (_npy(np.zeros((2, 2), int)), r"\(2, 2\)"),
        (_npy(np.array([[[None]]], dtype=object)), "object"),
        ([[[0.5]]], "float64"),
        ([[[0], [1, 2]]], "no array"),
        ([[["a"]]], "integer dtype"),
        ({"shape": [1, 1, 1]}, "expected data, shape and dtype"),
        ({"data": "", "shape": [1, True, 1]}, "whole numbers"),
        ({"data": "AAAA", "shape": [1, 3, 2]}, "holds 3 ids; its shape .* needs 6"),
        ({"data": "AAAA", "shape": [1, 3, 1], "dtype": "float32"}, "float32"),
        ({"data": "AAAA", "shape": [1, 3, 1], "dtype": ["uint8"]}, "uint8"),
        ({"data": "AAAA", "shape": [2**40, 2**40, 1]}, "at most"),
        ({"data": "AAAA", "shape": [-1, 3, 1]}, "-1"),
    ],
)
def test_a_broken_payload_is_one_clear_error(payload: Any, message: str) -> None:
    with pytest.raises(RoutesError, match=message):
        Routes.from_vllm(payload, keys=ALL_MOE)


def _npy_with_header(text: str) -> bytes:
    header = text.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i4', 'fortran_order': False, 'shape': (1000000, 1000000, 1000)}",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (1000, 1000, 64)}",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (True, 1, 1)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1)}",
        "{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (1, 1, 1)}",
        "{'descr': '<i4'}",
        "(" * 3000,
        "__import__('os')",
    ],
)
def test_a_header_that_lies_allocates_nothing(header: str) -> None:
    with pytest.raises(RoutesError):
        decode_ids(_npy_with_header(header))


def test_payloads_beyond_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads_module, "MAX_IDS", 10)
    monkeypatch.setattr(payloads_module, "_MAX_BYTES", 80)
    with pytest.raises(RoutesError, match="at most 10"):
        decode_ids(np.zeros((11, 1, 1), int))
    with pytest.raises(RoutesError, match="at most 10"):
        decode_raw(b"\0" * 44)
    with pytest.raises(RoutesError, match="at most 10"):
        decode_raw("A" * 161)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["data", "shape", "dtype", "routed_experts", "meta_info"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def _almost_npy(draw: st.DrawFn) -> bytes:
    content = bytearray(_npy(_ids(draw(st.integers(0, 3)), draw(st.integers(1, 3)))))
    for _ in range(draw(st.integers(0, 4))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))])


@given(
    payload=JSON_LIKE
    | _almost_npy()
    | _almost_npy().map(_base64)
    | st.binary(max_size=64).map(lambda content: b"\x93NUMPY" + content)
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_decoders_raise_nothing_but_routes_errors(payload: Any) -> None:
    for read in (
        lambda: Routes.from_vllm(payload, keys=ALL_MOE, num_experts=64),
        lambda: Routes.from_vllm(payload),
        lambda: Routes.from_sglang(payload, top_k=2, keys=DENSE_FIRST, num_layers=4, num_experts=64),
        lambda: Routes.from_numpy(payload),
    ):
        try:
            routes = read()
        except RoutesError:
            continue
        assert routes.ids.numel() <= 10_000


def test_a_header_of_json_is_not_evaluated_twice() -> None:
    # a payload that is JSON text in bytes is no .npy file
    with pytest.raises(RoutesError, match="begins with"):
        decode_ids(json.dumps([[[1]]]).encode())

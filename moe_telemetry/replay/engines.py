"""What rollout engines send, to rows by router: the layer axis, physical ids, and rows left out.

Letters: n rows of a payload, A layers of a payload, L router layers, K experts a token, E experts, P physical experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_telemetry.errors import RoutesError
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay.lazy import MAX_IDS
from moe_telemetry.replay.payloads import IdArray, Payload, as_ids, decode_ids, decode_raw

__all__ = [
    "ExpertMap",
    "Found",
    "decode",
    "decode_shapeless",
    "place_rows",
    "read_array",
    "read_arrays",
]

ExpertMap = Sequence[int] | Sequence[Sequence[int]] | IdArray | Tensor
"""The logical id of each physical expert: `[P]` for all layers, or `[A, P]` by layer of the payload."""

_DECODER = "decoder"
_MAX_PHYSICAL = 2**16
_MAX_ID = 2**16 - 1


class Found(NamedTuple):
    """Routes as read from a payload."""

    ids: Tensor
    """int32 `[n, L, K]`."""
    keys: tuple[RouterKey, ...]
    suspicions: tuple[str, ...]


def decode(payload: Payload) -> IdArray:
    """Return ids `[n, A, K]` of a payload, or of the response field that holds it.

    Raises:
        RoutesError: it cannot be decoded.
    """
    return decode_ids(_field(payload))


def decode_shapeless(
    payload: Payload,
    *,
    dtype: str,
    top_k: int,
    keys: Sequence[RouterKey],
    num_layers: int | None,
    start: int,
    num_tokens: int | None,
) -> IdArray:
    """Return ids `[n, A, K]` of integers without a shape, A being whichever layer count fits.

    Raises:
        RoutesError: none fits; the message names the layer counts and the size.
    """
    payload = _field(payload)
    if not isinstance(payload, (str, bytes)):
        return decode_ids(payload)
    ids = decode_raw(payload, dtype=dtype)
    counts = dict.fromkeys((_all_layers(keys, num_layers), len(_decoder_keys(keys))))
    for layers in counts:
        row = layers * top_k
        if row < 1 or ids.size % row:
            continue
        missing = None if num_tokens is None else num_tokens - start - ids.size // row
        if missing is None or missing in {0, 1}:
            return ids.reshape(-1, layers, top_k)
    expected = " or ".join(f"{layers} layers x {top_k}" for layers in counts)
    tokens = "whole tokens" if num_tokens is None else f"{num_tokens - start} tokens or one less"
    raise RoutesError(f"payload holds {ids.size} ids of {dtype}; expected {tokens} of {expected} ids")


def _field(payload: Any) -> Any:  # noqa: ANN401  # parsed JSON
    """Follow `meta_info`, `sglext` and `routed_experts` down to the payload."""
    for _ in range(3):
        if not isinstance(payload, Mapping):
            break
        name = next((name for name in ("routed_experts", "meta_info", "sglext") if name in payload), None)
        if name is None:
            break
        payload = payload[name]
    if payload is None:
        raise RoutesError("the response has routed_experts=None: the engine was not asked to return routes")
    return payload


def read_arrays(arrays: Sequence[IdArray], **fit: Any) -> Found:  # noqa: ANN401  # the keywords of read_array
    """Return prompt and completion parts as one; keywords and errors as those of `read_array`."""
    shapes = [array.shape for array in arrays]
    if len({shape[1:] for shape in shapes}) != 1:
        raise RoutesError(f"parts of a payload have shapes {shapes}; expected the same layers and K")
    if len({array.dtype for array in arrays}) != 1:
        raise RoutesError(f"parts of a payload have dtypes {[str(array.dtype) for array in arrays]}; expected one")
    return read_array(np.concatenate(arrays) if len(arrays) > 1 else arrays[0], **fit)


def read_array(
    ids: IdArray,
    *,
    keys: Sequence[RouterKey] | None,
    num_layers: int | None,
    num_experts: int | None,
    physical_to_logical: ExpertMap | None = None,
) -> Found:
    """Return the routers' ids out of `[n, A, K]`, logical and checked.

    Raises:
        RoutesError: an id is beyond 65,535, the map does not fit, or A is no layer count of the model.
    """
    ids = as_ids(ids)
    suspicions = _dtype_suspicions(ids, num_experts)
    keys, layers = _choose_layers(ids.shape[1], keys, num_layers)
    chosen = ids[:, layers]
    if chosen.size and not -_MAX_ID - 1 <= int(chosen.min()) <= int(chosen.max()) <= _MAX_ID:
        raise RoutesError(
            f"ids from {chosen.min()} to {chosen.max()} are no experts: expected -1 to {_MAX_ID}; "
            "is the dtype of the payload right?"
        )
    ids_nLK = torch.from_numpy(np.array(chosen, dtype=np.int32))
    if physical_to_logical is not None:
        ids_nLK = _to_logical(ids_nLK, physical_to_logical, ids.shape[1], layers)
    beyond = 0 if num_experts is None else int((ids_nLK >= num_experts).sum())
    if beyond:
        suspicions += (f"{beyond} of {ids_nLK.numel()} ids are {num_experts} or more, the number of experts",)
    return Found(ids_nLK, keys, suspicions)


def _dtype_suspicions(ids: IdArray, num_experts: int | None) -> tuple[str, ...]:
    if num_experts is None or np.iinfo(ids.dtype).max >= num_experts - 1:
        return ()
    limit = np.iinfo(ids.dtype).max
    return (f"the payload is {ids.dtype}, but there are {num_experts} experts: ids above {limit} would have wrapped",)


def _decoder_keys(keys: Sequence[RouterKey]) -> tuple[RouterKey, ...]:
    # engines return the decoder's layers only: an mtp or draft router has no place in the payload
    blocks = {key.block for key in keys}
    block = _DECODER if _DECODER in blocks else next(iter(blocks), _DECODER)
    if block != _DECODER and len(blocks) > 1:
        raise RoutesError(f"routers of the blocks {sorted(blocks)}: a payload has the layers of one block")
    return tuple(sorted((key for key in keys if key.block == block), key=lambda key: key.layer))


def _all_layers(keys: Sequence[RouterKey], num_layers: int | None) -> int:
    if num_layers is not None:
        return num_layers
    return max((key.layer for key in _decoder_keys(keys)), default=-1) + 1


def _choose_layers(
    count: int, keys: Sequence[RouterKey] | None, num_layers: int | None
) -> tuple[tuple[RouterKey, ...], list[int]]:
    """Return the routers in the payload, and the place of each on its layer axis."""
    if keys is None:
        keys = [RouterKey(_DECODER, layer) for layer in range(count)]
    routers = _decoder_keys(keys)
    total = _all_layers(keys, num_layers)
    if count == total and all(key.layer < total for key in routers):
        return routers, [key.layer for key in routers]
    if count == len(routers):
        return routers, list(range(count))
    raise RoutesError(
        f"the payload has {count} layers, the model has {total} layers and {len(routers)} routers; "
        "expected all layers or the routers alone"
    )


def _to_logical(ids_nLK: Tensor, expert_map: ExpertMap, num_payload_layers: int, layers: Sequence[int]) -> Tensor:
    logical = torch.as_tensor(np.asarray(expert_map))
    if logical.dtype == torch.bool or logical.is_floating_point() or logical.ndim not in {1, 2}:
        raise RoutesError(
            f"physical_to_logical has shape {tuple(logical.shape)}, {logical.dtype}; expected integers [P]"
        )
    if not 1 <= logical.shape[-1] <= _MAX_PHYSICAL:
        raise RoutesError(f"physical_to_logical has {logical.shape[-1]} experts; expected 1 to {_MAX_PHYSICAL}")
    if logical.ndim == 2:
        if len(logical) not in {num_payload_layers, len(layers)}:
            raise RoutesError(f"physical_to_logical has {len(logical)} layers, the payload {num_payload_layers}")
        logical = logical[list(layers)] if len(logical) == num_payload_layers else logical
    map_LP = logical.to(torch.int32).expand(len(layers), logical.shape[-1])
    index_LX = ids_nLK.transpose(0, 1).flatten(1).long()
    mapped = map_LP.gather(1, index_LX.clamp(0, map_LP.shape[1] - 1))
    # an id that the map does not know stays as it is, and is counted as out of range: never clamped
    known = (index_LX >= 0) & (index_LX < map_LP.shape[1])
    mapped = torch.where(known, mapped, index_LX.to(torch.int32))
    return mapped.reshape(len(layers), len(ids_nLK), -1).transpose(0, 1).contiguous()


def place_rows(ids_nLK: Tensor, *, start: int, num_tokens: int | None) -> Tensor:
    """Return `[T, L, K]`: the rows from token `start` on, missing rows before them and for the last token.

    Raises:
        RoutesError: the row count is neither that of the tokens nor one less.
    """
    end = start + len(ids_nLK)
    total = end if num_tokens is None else num_tokens
    if start < 0 or total - end not in {0, 1}:
        raise RoutesError(
            f"{len(ids_nLK)} rows from token {start} on for {total} tokens; expected {total - start} rows, "
            "or one less where the last token was not forwarded"
        )
    if total < 1 or total * ids_nLK.shape[1] * ids_nLK.shape[2] > MAX_IDS:
        raise RoutesError(f"routes of {total} tokens; expected 1 or more, and at most {MAX_IDS} ids")
    placed = torch.full((total, *ids_nLK.shape[1:]), -1, dtype=torch.int32)
    placed[start:end] = ids_nLK
    return placed

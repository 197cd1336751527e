"""Bytes that an engine sends, to arrays of expert ids: never more memory than a bound, never pickle.

    ndarray, nested lists   taken as they are
    str                     base64 of what follows
    bytes                   a `.npy` file, or raw integers without a shape
    mapping                 {"data": str or bytes of raw integers, "shape": [n, A, K], "dtype": "uint8"}

Letters: n rows, A layers of a payload, K experts a token.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_telemetry.errors import RoutesError
from moe_telemetry.replay.lazy import MAX_IDS

__all__ = ["IdArray", "Payload", "as_ids", "decode_ids", "decode_raw"]

_MAX_BYTES = 8 * MAX_IDS
_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 4096
_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")

IdArray = NDArray[np.integer[Any]]
Payload = str | bytes | IdArray | Sequence[Any] | Mapping[str, Any]
"""What an engine sends of one sequence."""


def decode_ids(payload: Payload) -> IdArray:
    """Return the expert ids `[n, A, K]` of a payload that knows its shape, in its own integer dtype.

    Raises:
        RoutesError: it is truncated, of another shape or dtype, or holds more than `MAX_IDS` ids.
    """
    if isinstance(payload, Mapping):
        return _decode_mapping(payload)
    if isinstance(payload, (str, bytes)):
        return _decode_npy(_to_bytes(payload))
    return as_ids(payload)


def decode_raw(payload: str | bytes, *, dtype: str = "int32") -> IdArray:
    """Return the expert ids `[n * A * K]` of integers without a shape, little-endian.

    Raises:
        RoutesError: the dtype is unknown, or the bytes are not whole numbers of it.
    """
    if dtype not in _DTYPES:
        raise RoutesError(f"dtype {dtype!r} of a payload: expected one of {', '.join(_DTYPES)}")
    content = _to_bytes(payload)
    itemsize = np.dtype(dtype).itemsize
    if len(content) % itemsize:
        raise RoutesError(f"payload of {len(content)} bytes is truncated: expected a multiple of {itemsize} ({dtype})")
    _check_count(len(content) // itemsize)
    return np.frombuffer(content, np.dtype(dtype).newbyteorder("<"))


def as_ids(values: object) -> IdArray:
    """Return an array or nested lists as an array of integers `[n, A, K]`.

    Raises:
        RoutesError: they are no such array.
    """
    try:
        ids = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RoutesError(f"{type(values).__name__} is no array of expert ids: {error}") from error
    if ids.dtype.kind not in "iu":
        raise RoutesError(f"expert ids are {ids.dtype}; expected an integer dtype")
    _check_shape(ids.shape)
    return ids


def _to_bytes(payload: str | bytes) -> bytes:
    if len(payload) > _MAX_BYTES * 2:
        raise RoutesError(f"payload of {len(payload)} bytes; expected at most {MAX_IDS} ids")
    if isinstance(payload, bytes):
        return payload
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutesError(f"payload is not base64: {error}") from error


def _decode_mapping(payload: Mapping[str, Any]) -> IdArray:
    data, shape = payload.get("data"), payload.get("shape")
    if not isinstance(data, (str, bytes)) or not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        raise RoutesError(f"payload with the keys {sorted(map(str, payload))}: expected data, shape and dtype")
    if not all(type(size) is int for size in shape):
        raise RoutesError(f"payload shape {list(shape)!r}: expected whole numbers")
    _check_shape(tuple(shape))
    # writers that send no dtype are older than its field, and wrote uint8
    dtype = payload.get("dtype", "uint8")
    ids = decode_raw(data, dtype=dtype if isinstance(dtype, str) else repr(dtype))
    return _shaped(ids, tuple(shape))


def _decode_npy(content: bytes) -> IdArray:
    if not content.startswith(_MAGIC):
        raise RoutesError(f"payload begins with {content[:6]!r}; expected a .npy file, which begins with {_MAGIC!r}")
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran, dtype = read_header(stream, max_header_size=_MAX_HEADER)
    except Exception as error:  # the header is evaluated as a Python literal, which fails in many ways
        raise RoutesError(f".npy header cannot be read: {type(error).__name__}: {error}") from error
    if dtype.kind not in "iu":
        raise RoutesError(f".npy payload holds {dtype}; expected integers")
    if not all(type(size) is int for size in shape):
        raise RoutesError(f".npy payload has shape {shape!r}; expected whole numbers")
    _check_shape(shape)
    size = len(content) - stream.tell()
    if size % dtype.itemsize:
        raise RoutesError(f".npy payload of {size} bytes is truncated: expected a multiple of {dtype.itemsize}")
    return _shaped(np.frombuffer(content, dtype, offset=stream.tell()), shape, "F" if is_fortran else "C")


def _shaped(ids: IdArray, shape: tuple[int, ...], order: Any = "C") -> IdArray:  # noqa: ANN401  # numpy's own literal
    if ids.size != math.prod(shape):
        raise RoutesError(f"payload holds {ids.size} ids; its shape {shape} needs {math.prod(shape)}")
    return ids.reshape(shape, order=order)


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or min(shape) < 0 or shape[2] < 1 or shape[1] < 1:
        raise RoutesError(f"expert ids have shape {shape}; expected [tokens, layers, K]")
    _check_count(math.prod(shape))


def _check_count(count: int) -> None:
    if count > MAX_IDS:
        raise RoutesError(f"{count} expert ids in one payload; expected at most {MAX_IDS}")

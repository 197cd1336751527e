"""Tensors of a trace, read row by row out of its safetensors files, wherever these lie.

A safetensors file is the length of its header in 8 bytes, the header as JSON, and the tensors' bytes. Reading them by
range needs neither the whole file nor a local one, and numpy, which has no bfloat16, gets float32 in its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_telemetry.errors import TraceError
from moe_telemetry.trace.format import tensors_name
from moe_telemetry.trace.reader import Chunk, Part, Trace

__all__ = ["StoredTensor", "TensorIndex", "steps_of_parts"]

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MOST_HEADER_BYTES = 100_000_000  # as the format's own library
_HEADERS_KEPT = 16


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    trace: Trace
    part: Part
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""

    def rows(self, first: int = 0, stop: int | None = None) -> NDArray[np.floating[Any]]:
        """Return rows `first` up to `stop` of it, bfloat16 as float32.

        Raises:
            TraceError: the file ends before the tensor does, or its dtype is none of a model's states and weights.
        """
        if self.dtype not in _DTYPES:
            name = self.trace.file(tensors_name(*self.part))
            raise TraceError(f"{name} has a tensor of {self.dtype}; expected one of {', '.join(_DTYPES)}")
        count = (self.shape[0] if stop is None else stop) - first
        dtype = np.dtype(_DTYPES[self.dtype])
        row_bytes = dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        offset = self.start + first * row_bytes
        content = self.trace.read(tensors_name(*self.part), offset, offset + count * row_bytes)
        if len(content) != count * row_bytes:
            raise _damaged(self.trace, self.part, "it ends early")
        values = np.frombuffer(content, dtype).reshape(count, *self.shape[1:])
        if self.dtype == "BF16":
            # the upper half of a float32
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values


class TensorIndex:
    """Finds the tensors of a trace by name."""

    def __init__(self, trace: Trace, steps: Mapping[Part, tuple[int, int]]) -> None:
        self._trace = trace
        self._steps = steps
        self._header = lru_cache(maxsize=_HEADERS_KEPT)(self._read_header)

    def find(self, name: str, step: int, near: Part) -> StoredTensor | None:
        """Return a tensor of a step that the rank of a part wrote; None where it did not.

        A step that was rolled back may have it twice: the part's own comes first, then those before it.
        """
        parts = self._parts_of.get(near.rank, [])
        for part in sorted(parts, key=lambda part: (part.number > near.number, -part.number)):
            first, last = self._steps[part]
            if first <= step <= last and (found := self._header(part).get(name)) is not None:
                return found
        return None

    def find_anywhere(self, name: str, step: int, near: Part) -> StoredTensor | None:
        """Return a tensor that is the same on all ranks: the rank's own, else that of the lowest other one."""
        for rank in (near.rank, *(other for other in sorted(self._parts_of) if other != near.rank)):
            if (found := self.find(name, step, near._replace(rank=rank))) is not None:
                return found
        return None

    def find_beside(self, name: str, found: StoredTensor) -> StoredTensor | None:
        """Return another tensor of the file that holds `found`; None where it is not there."""
        return self._header(found.part).get(name)

    @cached_property
    def _parts_of(self) -> dict[int, list[Part]]:
        parts: dict[int, list[Part]] = {}
        for part in sorted(self._steps):
            parts.setdefault(part.rank, []).append(part)
        return parts

    def _read_header(self, part: Part) -> dict[str, StoredTensor]:
        name = tensors_name(*part)
        size = self._trace.size(name)
        if not size:
            return {}  # a part whose calls have no tensors needs no such file
        length = int.from_bytes(self._trace.read(name, 0, 8), "little")
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise _damaged(self._trace, part, f"a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(self._trace.read(name, 8, 8 + length))
            return {
                tensor: self._stored(part, entry, 8 + length, size)
                for tensor, entry in header.items()
                if tensor != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(self._trace, part, str(error)) from error

    def _stored(self, part: Part, entry: Mapping[str, Any], offset: int, size: int) -> StoredTensor:
        start, stop = entry["data_offsets"]
        shape = tuple(map(int, entry["shape"]))
        dtype = entry["dtype"]
        if dtype in _DTYPES and np.dtype(_DTYPES[dtype]).itemsize * int(np.prod(shape, dtype=np.int64)) != stop - start:
            raise ValueError(f"{stop - start} bytes for a tensor of {dtype} {list(shape)}")
        if not 0 <= start <= stop <= size - offset:
            raise ValueError(f"a tensor at bytes {start} to {stop} of {size - offset}")
        return StoredTensor(self._trace, part, dtype, shape, offset + start)


def steps_of_parts(chunks: tuple[Chunk, ...]) -> dict[Part, tuple[int, int]]:
    """Return the first and the last step of every part."""
    steps: dict[Part, tuple[int, int]] = {}
    for chunk in chunks:
        first, last = steps.get(chunk.part, (chunk.first_step, chunk.last_step))
        steps[chunk.part] = min(first, chunk.first_step), max(last, chunk.last_step)
    return steps


def _damaged(trace: Trace, part: Part, reason: str) -> TraceError:
    name = trace.file(tensors_name(*part))
    return TraceError(f"{name} is no whole safetensors file ({reason}); copy it again, or delete it and its part")

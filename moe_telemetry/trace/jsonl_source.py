"""JsonlTrace: files of JSON lines, written by others or by `write_jsonl`, read as if they were a trace.

Such files say neither how many experts there are nor which ranks hold the same tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TextIO

import fsspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from moe_telemetry.errors import ConfigError, TraceError
from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.format import schema_for
from moe_telemetry.trace.jsonl import read_jsonl
from moe_telemetry.trace.manifest import MOST_EXPERTS
from moe_telemetry.trace.reader import COLUMNS, IDS_PER_BATCH, Chunk, Part, Trace, open_trace
from moe_telemetry.trace.rows import TraceRow
from moe_telemetry.trace.store import files_in, filesystem_of

__all__ = ["JsonlTrace", "open_any_trace"]

_ENDINGS = (".jsonl", ".jsonl.gz")
_STEPS_UNKNOWN = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class JsonlTrace(Trace):
    """One part a file, each of one chunk, whose steps nobody knows before it is read."""

    folder: str = ""
    """URL of the folder that the files lie in."""
    names: tuple[str, ...] = ()
    fewest_experts: int = 0
    """E of every router, which the user says here and the manifests say elsewhere."""

    @property
    def counted_parts(self) -> tuple[Part, ...]:
        """All files: nothing says which ranks hold the same tokens."""
        return self.parts

    @property
    def tensors(self) -> tuple[str, ...]:
        """None: JSON lines hold routes alone."""
        return ()

    def experts_of(self, key: RouterKey) -> int:  # noqa: ARG002  # all routers have as many
        """Return E."""
        return self.fewest_experts

    def chunks(self, parts: Sequence[Part] | None = None) -> tuple[Chunk, ...]:
        """Return a chunk a file."""
        return tuple(Chunk(part, 0, 1, *_STEPS_UNKNOWN, 0) for part in parts or self.parts)

    def batches(self, chunk: Chunk, columns: Sequence[str] = COLUMNS) -> Iterator[pa.RecordBatch]:
        """Yield the lines of a file, about half a million expert ids at a time.

        Raises:
            TraceError: a line cannot be read.
        """
        schema = schema_for(self.fewest_experts + 1)  # E itself stands for all that is out of range
        with self._text(self.names[chunk.part.number]) as file:
            for rows in _in_batches(read_jsonl(file)):
                yield _as_batch(rows, schema).select(list(columns))

    @cached_property
    def _place(self) -> tuple[fsspec.AbstractFileSystem, str]:
        return filesystem_of(self.folder)

    def _text(self, name: str) -> TextIO:
        try:
            # some editors begin a file with a byte order mark
            file: TextIO = self.filesystem.open(self.file(name), "r", encoding="utf-8-sig", compression="infer")
        except FileNotFoundError as error:
            raise TraceError(f"{self.file(name)}: no such file; expected JSON lines") from error
        return file


def open_any_trace(url: str | os.PathLike[str], *, num_experts: int | None = None) -> Trace:
    """Open the folder of a trace, or a file or a folder of JSON lines.

    Args:
        url: Path or URL.
        num_experts: E, which JSON lines do not say; a trace with manifests knows better.

    Raises:
        TraceError: it cannot be opened, or E is missing.
        ConfigError: E is out of range.
    """
    text = os.fspath(url)
    names, folder = _jsonl_files(text)
    if not names:
        return open_trace(text)
    if num_experts is None:
        raise TraceError(f"{text} holds JSON lines, which do not say how many experts there are: give --num-experts")
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ConfigError(f"num_experts={num_experts}: expected 1 to {MOST_EXPERTS}")
    notes = ("JSON lines do not say which ranks hold the same tokens: all are counted",)
    parts = tuple(Part(0, number) for number in range(len(names)))
    return JsonlTrace(text, (), parts, notes, folder, names, num_experts)


def _jsonl_files(url: str) -> tuple[tuple[str, ...], str]:
    """Return the names of files of JSON lines at a URL, none where it is a trace, and the URL of their folder."""
    filesystem, root = filesystem_of(url)
    if url.endswith(_ENDINGS) and not filesystem.isdir(root):
        folder, _, name = url.rpartition("/")
        return (name,), folder or "."
    files = files_in(filesystem, root, url)
    if any(name.startswith("manifest-") for name in files):
        return (), url
    return tuple(sorted(name for name in files if name.endswith(_ENDINGS))), url


def _in_batches(rows: Iterator[TraceRow]) -> Iterator[list[TraceRow]]:
    batch: list[TraceRow] = []
    num_ids = 0
    for row in rows:
        batch.append(row)
        num_ids += row.expert_ids.size
        if num_ids >= IDS_PER_BATCH:
            yield batch
            batch, num_ids = [], 0
    if batch:
        yield batch


def _as_batch(rows: Sequence[TraceRow], schema: pa.Schema) -> pa.RecordBatch:
    ids_M = np.concatenate([row.expert_ids.ravel() for row in rows])
    starts = np.fromiter(chain.from_iterable(row.sequence_starts for row in rows), dtype=np.int32)
    kind = schema.field("expert_ids").type.value_type.to_pandas_dtype()
    ids_M = np.minimum(ids_M, np.iinfo(kind).max).astype(kind)
    columns = {
        "step": [row.step for row in rows],
        "microbatch": [row.microbatch for row in rows],
        "stage": [row.stage for row in rows],
        "block": [row.key.block for row in rows],
        "layer": [row.key.layer for row in rows],
        "rank": [row.rank for row in rows],
        "num_tokens": [row.num_tokens for row in rows],
        "top_k": [max(1, row.top_k) for row in rows],  # a call without tokens may not say its K
        "is_sorted": [row.is_sorted for row in rows],
        "expert_ids": _lists(ids_M, [row.expert_ids.size for row in rows], schema.field("expert_ids").type),
        "valid": pa.nulls(len(rows), schema.field("valid").type),
        "sequence_starts": _lists(
            starts, [len(row.sequence_starts) for row in rows], schema.field("sequence_starts").type
        ),
    }
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def _lists(flat: NDArray[Any], lengths: Sequence[int], kind: pa.ListType) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, kind.value_type), type=kind)

"""Reading a route trace: a folder's manifests and parts, checked first, then streamed in batches of bounded size.

    trace = open_trace("s3://bucket/run-7/trace")
    for chunk in trace.chunks():
        for batch in trace.batches(chunk, ("step", "expert_ids")):
            ...

A folder is a path or any URL of fsspec. Ranks that hold the same tokens are read once. Files that a killed
run left half written have other names, and are passed over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moe_telemetry.errors import TraceError
from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.batches import check_columns, check_rows
from moe_telemetry.trace.consistency import check_known_ranks, check_one_job, missing_pieces
from moe_telemetry.trace.format import part_name, schema_for
from moe_telemetry.trace.manifest import Manifest, TracedRouter, manifest_name
from moe_telemetry.trace.rows import TraceRow
from moe_telemetry.trace.store import files_in, filesystem_of, is_local

__all__ = ["COLUMNS", "IDS_PER_BATCH", "Chunk", "Part", "Trace", "open_trace"]

_MANIFEST = re.compile(r"manifest-\d+\.json")
_PART = re.compile(r"routes-(\d+)-(\d+)\.parquet")
IDS_PER_BATCH = 2**19
"""About as many expert ids as a batch holds: some 10 MB while they are counted."""
COLUMNS = tuple(schema_for(1).names)
"""All columns of a trace."""


class Part(NamedTuple):
    """A whole Parquet file of one rank."""

    rank: int
    number: int


class Chunk(NamedTuple):
    """What is read in one go: a row group of a part, and the steps in it."""

    part: Part
    row_group: int
    num_rows: int
    first_step: int
    last_step: int
    num_ids: int
    """Expert ids of all its rows."""


@dataclass(frozen=True)
class Trace:
    """A folder of route files whose manifests have been read; the routes are read when asked for."""

    url: str
    manifests: tuple[Manifest, ...]
    """One a rank, by rank."""
    parts: tuple[Part, ...]
    """All whole parts, by rank and number."""
    notes: tuple[str, ...] = ()
    """What is missing, in sentences."""

    @property
    def routers(self) -> tuple[TracedRouter, ...]:
        """All routers of the job, in the order of the model."""
        return self.manifests[0].routers

    @property
    def tensors(self) -> tuple[str, ...]:
        """What was captured beside the routes."""
        return self.manifests[0].tensors

    @cached_property
    def counted_ranks(self) -> frozenset[int]:
        """Of ranks that hold the same tokens, the lowest one with a part: a single rank may have been traced."""
        writing = {part.rank for part in self.parts}
        lowest: dict[int, int] = {}
        for manifest in self.manifests:
            if manifest.rank in writing:
                lowest.setdefault(manifest.token_group, manifest.rank)
        return frozenset(lowest.values())

    @property
    def counted_parts(self) -> tuple[Part, ...]:
        """The parts whose tokens no other part that is counted holds, too."""
        return tuple(part for part in self.parts if part.rank in self.counted_ranks)

    @property
    def fewest_experts(self) -> int:
        """E of the router with the fewest."""
        return min(router.num_experts for router in self.routers)

    def experts_of(self, key: RouterKey) -> int:
        """Return E of a router.

        Raises:
            TraceError: the manifests do not name it.
        """
        for router in self.routers:
            if router.key == key:
                return router.num_experts
        raise TraceError(f"{self.url} has routes of {key}, which its manifests do not name")

    def chunks(self, parts: Sequence[Part] | None = None) -> tuple[Chunk, ...]:
        """Return what `batches` can read, by step; of `counted_parts` where no other are given.

        Raises:
            TraceError: a part is no whole Parquet file, or lacks a column of a trace.
        """
        chosen = self.counted_parts if parts is None else parts
        return tuple(sorted((chunk for part in chosen for chunk in self._chunks_of(part)), key=_by_step))

    def batches(self, chunk: Chunk, columns: Sequence[str] = COLUMNS) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a chunk, about half a million expert ids at a time.

        Raises:
            TraceError: the part cannot be read, or a row does not fit itself.
        """
        with self._opened(chunk.part) as file:
            size = max(1, IDS_PER_BATCH * chunk.num_rows // max(1, chunk.num_ids))
            for batch in file.iter_batches(
                size, row_groups=[chunk.row_group], columns=list(columns), use_threads=False
            ):
                check_rows(batch, self.file(part_name(*chunk.part)))
                yield batch

    def rows(self, chunk: Chunk) -> Iterator[TraceRow]:
        """Yield the rows of a chunk one by one.

        Raises:
            TraceError: the part cannot be read.
        """
        for batch in self.batches(chunk):
            yield from map(_as_row, batch.to_pylist())

    def file(self, name: str) -> str:
        """Return the path of a file of the trace on its filesystem."""
        return f"{self._root}/{name}"

    def size(self, name: str) -> int:
        """Return the bytes of a file, 0 where it is not there."""
        size = self._sizes.get(name, 0)
        return int(self.filesystem.size(self.file(name)) or 0) if size is None else size

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes `start` up to `stop` of a file of the trace."""
        content: bytes = self.filesystem.cat_file(self.file(name), start=start, end=stop)
        return content

    @cached_property
    def _place(self) -> tuple[fsspec.AbstractFileSystem, str]:
        filesystem, root = filesystem_of(self.url)
        return filesystem, root.rstrip("/")

    @property
    def filesystem(self) -> fsspec.AbstractFileSystem:
        """Where the files lie."""
        return self._place[0]

    @property
    def _root(self) -> str:
        return self._place[1]

    @cached_property
    def _sizes(self) -> dict[str, int | None]:
        return files_in(self.filesystem, self._root, self.url)

    def _chunks_of(self, part: Part) -> Iterator[Chunk]:
        with self._opened(part) as file:
            metadata = file.metadata
            column = file.schema_arrow.names.index("step")
            for index in range(metadata.num_row_groups):
                group = metadata.row_group(index)
                bounds = group.column(column).statistics
                if group.num_rows:
                    # a writer that kept no statistics leaves every step possible
                    first, last = (bounds.min, bounds.max) if bounds and bounds.has_min_max else (-(2**63), 2**63 - 1)
                    yield Chunk(part, index, group.num_rows, first, last, _num_ids(group))

    def _source(self, name: str) -> AbstractContextManager[Any]:
        # a local file is read by Arrow itself, which needs no Python for it
        if is_local(self.filesystem):
            return nullcontext(self.file(name))
        file: AbstractContextManager[Any] = self.filesystem.open(self.file(name))
        return file

    @contextmanager
    def _opened(self, part: Part) -> Iterator[pq.ParquetFile]:
        name = part_name(*part)
        try:
            with self._source(name) as source, pq.ParquetFile(source) as file:
                check_columns(file.schema_arrow, self.file(name))
                yield file
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TraceError(
                f"{self.file(name)} is no whole Parquet file ({reason}); copy it again, or delete it to read the others"
            ) from error


def open_trace(url: str | os.PathLike[str]) -> Trace:
    """Open the folder of a trace and check its manifests.

    Raises:
        TraceError: there is no folder or no manifest, manifests are of two jobs, or routes have no manifest.
    """
    text = os.fspath(url)
    filesystem, root = filesystem_of(text)
    files = files_in(filesystem, root, text)
    names = sorted(name for name in files if _MANIFEST.fullmatch(name))
    if not names:
        raise TraceError(f"{text} has no manifest-*.json; expected the folder that monitor.trace() wrote to")
    manifests = tuple(
        sorted(
            (_manifest(filesystem.cat_file(f"{root}/{name}"), name, text) for name in names),
            key=lambda manifest: manifest.rank,
        )
    )
    check_one_job(manifests, text)
    found = sorted(Part(int(match[1]), int(match[2])) for name in files if (match := _PART.fullmatch(name)))
    check_known_ranks(manifests, found, text)
    return Trace(text, manifests, tuple(found), tuple(missing_pieces(manifests, found)))


def _manifest(text: bytes, name: str, url: str) -> Manifest:
    try:
        manifest = Manifest.from_json(text)
    except TraceError as error:
        raise TraceError(f"{url}/{name}: {error}") from error
    if name != manifest_name(manifest.rank):
        raise TraceError(f"{url}/{name} is of rank {manifest.rank}; expected {manifest_name(manifest.rank)}")
    return manifest


def _as_row(values: Mapping[str, Any]) -> TraceRow:
    valid = values["valid"]
    return TraceRow(
        step=values["step"],
        microbatch=values["microbatch"],
        stage=values["stage"],
        key=RouterKey(values["block"], values["layer"]),
        rank=values["rank"],
        num_tokens=values["num_tokens"],
        top_k=values["top_k"],
        is_sorted=values["is_sorted"],
        expert_ids=np.array(values["expert_ids"], dtype=np.int32).reshape(-1, values["top_k"]),
        valid=None if valid is None else np.array(valid, dtype=np.bool_),
        sequence_starts=np.array(values["sequence_starts"], dtype=np.int32),
    )


def _by_step(chunk: Chunk) -> tuple[int, ...]:
    return chunk.first_step, chunk.last_step, *chunk.part, chunk.row_group


def _num_ids(group: pq.RowGroupMetaData) -> int:
    """Return how many expert ids a row group holds."""
    columns = (group.column(index) for index in range(group.num_columns))
    ids = next(column for column in columns if column.path_in_schema.startswith("expert_ids"))
    # a list without ids is a value, too, which the statistics count as null
    empty = ids.statistics.null_count if ids.statistics and ids.statistics.has_null_count else 0
    return int(ids.num_values - empty)

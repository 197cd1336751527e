"""Inventory: what a trace holds, from its manifests and the few small columns of its parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

import pyarrow.compute as pc

from moe_telemetry.analysis.opening import nothing_left, open_source
from moe_telemetry.analysis.selection import Selection
from moe_telemetry.trace.format import part_name, tensors_name
from moe_telemetry.trace.manifest import LeftOut, TracedRouter
from moe_telemetry.trace.reader import Chunk, Trace, open_trace

__all__ = ["Inventory", "take_inventory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What a trace holds."""

    trace: str
    run: str
    model: str
    routers: tuple[TracedRouter, ...]
    stages: tuple[str, ...]
    first_step: int
    last_step: int
    num_steps: int
    world_size: int
    ranks: tuple[int, ...]
    """Those with a manifest."""
    copies: tuple[int, ...]
    """Those whose tokens another rank holds, too: they are not counted."""
    num_parts: int
    num_calls: int
    """Router calls, of ranks that are counted; so are the next three."""
    choices: int
    """Expert ids."""
    token_layers: int
    """Rows: a token in one router call."""
    route_bytes: int
    """Bytes of the Parquet parts."""
    tensors: tuple[str, ...]
    tensor_bytes: int
    every_n_steps: int
    max_steps: int | None
    max_tokens_per_step: int | None
    is_complete: bool
    """Whether every rank's capture has ended by itself or was closed."""
    left_out: LeftOut
    """Added up over ranks."""
    silent_routers: tuple[str, ...]
    """Routers from which a rank saw no call."""
    notes: tuple[str, ...]

    @property
    def bytes_per_token_layer(self) -> float | None:
        """Bytes of the Parquet parts for a token in one router call."""
        return self.route_bytes / self.token_layers if self.token_layers else None

    def as_dict(self) -> dict[str, object]:
        """Return all of it as plain values, for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        routers = [{**asdict(router), "key": str(router.key)} for router in self.routers]
        return {
            **values,
            "routers": routers,
            "left_out": asdict(self.left_out),
            "bytes_per_token_layer": self.bytes_per_token_layer,
        }


def take_inventory(url: str | os.PathLike[str]) -> Inventory:
    """Return what the trace at a path or URL holds.

    Raises:
        TraceError: it cannot be read, or has no manifests.
    """
    trace = open_source(open_trace(url))
    found = [_of_chunk(trace, chunk) for chunk in trace.chunks()]
    steps = {step for each in found for step in each.steps}
    if not steps:
        raise nothing_left(trace, Selection())
    first = trace.manifests[0]
    return Inventory(
        trace=trace.url,
        run=first.run,
        model=first.model,
        routers=trace.routers,
        stages=tuple(sorted({stage for each in found for stage in each.stages})),
        first_step=min(steps),
        last_step=max(steps),
        num_steps=len(steps),
        world_size=first.world_size,
        ranks=tuple(manifest.rank for manifest in trace.manifests),
        copies=tuple(sorted({part.rank for part in trace.parts} - trace.counted_ranks)),
        num_parts=len(trace.parts),
        num_calls=sum(each.calls for each in found),
        choices=sum(each.choices for each in found),
        token_layers=sum(each.token_layers for each in found),
        route_bytes=sum(trace.size(part_name(*part)) for part in trace.counted_parts),
        tensors=first.tensors,
        tensor_bytes=sum(trace.size(tensors_name(*part)) for part in trace.parts),
        every_n_steps=first.every_n_steps,
        max_steps=first.max_steps,
        max_tokens_per_step=first.max_tokens_per_step,
        is_complete=not trace.notes and all(manifest.is_complete for manifest in trace.manifests),
        left_out=_sum(manifest.left_out for manifest in trace.manifests),
        silent_routers=tuple(
            dict.fromkeys(str(key) for manifest in trace.manifests for key in manifest.silent_routers)
        ),
        notes=trace.notes,
    )


@dataclass(frozen=True)
class _Found:
    steps: set[int]
    stages: set[str]
    calls: int
    choices: int
    token_layers: int


def _of_chunk(trace: Trace, chunk: Chunk) -> _Found:
    """Look at a chunk without reading its expert ids, where all its calls have one K."""
    steps: set[int] = set()
    stages: set[str] = set()
    top_ks: set[int] = set()
    for batch in trace.batches(chunk, ["step", "stage", "top_k"]):
        for name, found in (("step", steps), ("stage", stages), ("top_k", top_ks)):
            found.update(batch.column(name).unique().to_pylist())
    if len(top_ks) == 1:
        token_layers = chunk.num_ids // top_ks.pop()
    else:
        token_layers = sum(_token_layers(batch) for batch in trace.batches(chunk, ["top_k", "expert_ids"]))
    return _Found(steps, stages, chunk.num_rows, chunk.num_ids, token_layers)


def _token_layers(batch: object) -> int:
    top_k, ids = (batch.column(name) for name in ("top_k", "expert_ids"))  # type: ignore[attr-defined]
    return int(pc.sum(pc.divide(pc.list_value_length(ids), top_k)).as_py() or 0)


def _sum(several: Iterator[LeftOut]) -> LeftOut:
    all_of_them = list(several)
    names = [item.name for item in fields(LeftOut)]
    return LeftOut(**{name: sum(getattr(each, name) for each in all_of_them) for name in names})

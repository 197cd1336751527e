"""Whether the files of a folder are one trace, and what of it is missing: by manifests and the names of parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from moe_telemetry.errors import TraceError
from moe_telemetry.trace.format import part_name
from moe_telemetry.trace.manifest import Manifest, TracedRouter, manifest_name

__all__ = ["check_known_ranks", "check_one_job", "missing_pieces"]

_TRAITS: tuple[tuple[str, Callable[[Manifest], object]], ...] = (
    ("run", lambda manifest: manifest.run),
    ("model", lambda manifest: manifest.model),
    ("world size", lambda manifest: manifest.world_size),
    ("captured tensors", lambda manifest: manifest.tensors),
    ("routers", lambda manifest: f"{len(manifest.routers)}: {', '.join(map(_shape, manifest.routers[:3]))} ..."),
)


def check_one_job(manifests: Sequence[Manifest], url: str) -> None:
    """Check that manifests are of one job, which has routers.

    Raises:
        TraceError: they are not; the message names two files and what differs.
    """
    first = manifests[0]
    for other in manifests[1:]:
        if other.topology != first.topology:
            name, trait = next((each for each in _TRAITS if each[1](first) != each[1](other)), _TRAITS[-1])
            raise TraceError(
                f"{url} holds traces of two jobs: {manifest_name(first.rank)} has {name} {trait(first)!r}, "
                f"{manifest_name(other.rank)} has {trait(other)!r}; give each trace a folder of its own"
            )
    if not first.routers:
        raise TraceError(f"{url}/{manifest_name(first.rank)} names no router; expected one or more")


def _shape(router: TracedRouter) -> str:
    return f"{router.key} E={router.num_experts}"


def check_known_ranks(manifests: Sequence[Manifest], parts: Iterable[tuple[int, int]], url: str) -> None:
    """Check that every part, given by rank and number, is of a rank with a manifest.

    Raises:
        TraceError: one is not.
    """
    known = {manifest.rank for manifest in manifests}
    for rank, number in parts:
        if rank not in known:
            raise TraceError(
                f"{url} has {part_name(rank, number)} and no {manifest_name(rank)}, which says whose tokens these are; "
                "copy the manifest, too"
            )


def missing_pieces(manifests: Sequence[Manifest], parts: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Yield what is missing of a trace, in sentences; parts are given by rank and number, in order."""
    world_size = manifests[0].world_size
    if missing := sorted(set(range(world_size)) - {manifest.rank for manifest in manifests}):
        yield f"no manifest of ranks {_numbers(missing)} of {world_size}: tokens that they alone hold are not counted"
    if unended := [manifest.rank for manifest in manifests if not manifest.is_complete]:
        yield f"ranks whose capture has not ended (killed, or still running): {_numbers(unended)}"
    numbers = defaultdict(list)
    for rank, number in parts:
        numbers[rank].append(number)
    if holes := [rank for rank, found in numbers.items() if found != list(range(len(found)))]:
        yield f"ranks with parts missing between others: {_numbers(holes)}"


def _numbers(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"

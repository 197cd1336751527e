"""Manifest: what one rank captured, of which model, with which options, and what it left out.

Every rank of a capture writes one, `manifest-<rank>.json`, when it starts and again when it ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from moe_telemetry.errors import TraceError
from moe_telemetry.identity import RouterKey

__all__ = ["FORMAT", "MOST_EXPERTS", "TENSORS", "LeftOut", "Manifest", "TracedRouter", "manifest_name"]

FORMAT = 1
"""Number of the trace format; a reader refuses any other."""

MOST_EXPERTS = 2**24
"""Experts of a router beyond which a trace is refused: what is counted of each needs memory."""

TENSORS = ("scores", "hidden_states", "router_weights", "diagnostics")
"""What a capture may hold beside the routes, by the names of its options."""

_MOST_RANKS = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRouter:
    """One router of the job, whichever rank owns it."""

    key: RouterKey
    num_experts: int
    top_k: int | None = None
    """None where the adapter does not say; each row of the trace has its own."""
    score_function: str = "softmax"
    """`softmax`, `sigmoid` or `sqrtsoftplus`: what makes scores of logits."""
    is_biased: bool = False
    """Whether a bias or a group limit, too, decides the choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """What a capture saw and did not write, by the reason."""

    calls_behind: int = 0
    """Router calls dropped whole for want of memory: a slow disk, a step of many calls, or no `step()` at all."""
    calls_failed: int = 0
    """Router calls lost to an error of the disk, or of the device when they were copied."""
    tokens_over_limit: int = 0
    """Tokens beyond `max_tokens_per_step`, added up over routers."""
    calls_of_other_steps: int = 0
    """Router calls in steps that `every_n_steps` passes over."""
    calls_in_graphs: int = 0
    """Router calls seen while a CUDA graph was captured; replays of the graph are seen by nobody."""
    choices_over_top_k: int = 0
    """Choices of a routing map beyond K a token, as where a capacity is filled up: a row has K places."""

    @property
    def has_losses(self) -> bool:
        """Whether something is missing that the options did not ask to leave out."""
        return bool(self.calls_behind or self.calls_failed or self.calls_in_graphs or self.choices_over_top_k)

    def __str__(self) -> str:
        """Return what was left out as a text, as in `calls behind: 3, tokens over limit: 7192`."""
        counts = {name.replace("_", " "): count for name, count in asdict(self).items() if count}
        return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One rank's part of a trace."""

    run: str
    model: str
    """Class of the model."""
    rank: int
    world_size: int
    token_group: int
    """The lowest rank that sees the same tokens as this one: tokens are counted where it equals `rank`."""
    routers: tuple[TracedRouter, ...]
    """All routers of the job, in the order of the model; the same in every manifest of a trace."""
    tensors: tuple[str, ...] = ()
    """Those of `TENSORS` that were captured."""
    every_n_steps: int = 1
    max_steps: int | None = None
    max_tokens_per_step: int | None = None
    is_complete: bool = False
    """True once the capture has ended by itself or by `close()`; False of one that was killed or still runs."""
    left_out: LeftOut = field(default_factory=LeftOut)
    silent_routers: tuple[RouterKey, ...] = ()
    """Routers of this rank from which no call came, as where their code was compiled before `watch`."""

    @property
    def topology(self) -> tuple[object, ...]:
        """What has to be the same in all manifests of one trace."""
        return self.run, self.model, self.world_size, self.routers, self.tensors

    def to_json(self) -> str:
        """Serialise to JSON that `from_json` reads back to an equal manifest."""
        values = asdict(self)
        values["routers"] = [{**asdict(router), "key": str(router.key)} for router in self.routers]
        values["silent_routers"] = [str(key) for key in self.silent_routers]
        return json.dumps({"format": FORMAT, **values}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read what `to_json` wrote; fields that a later version added are ignored.

        Raises:
            TraceError: `text` is no manifest, or one of another format.
        """
        try:
            values = json.loads(text)
            version = values.pop("format")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise TraceError(f"not the manifest of a route trace: {text[:80]!r}") from error
        if version != FORMAT:
            raise TraceError(f"the trace has format {version!r}; this version reads {FORMAT}")
        try:
            values["routers"] = _routers(values["routers"])
            _check_numbers(values)
            values["tensors"] = tuple(map(str, values["tensors"]))
            values["silent_routers"] = tuple(RouterKey.parse(text) for text in values.get("silent_routers", ()))
            values["left_out"] = _left_out(values["left_out"])
            return cls(**_known(cls, values))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise TraceError(f"the manifest is damaged: {error}") from error


def manifest_name(rank: int) -> str:
    """Return the name of a rank's manifest within the trace's folder."""
    return f"manifest-{rank:05d}.json"


def _check_numbers(values: Mapping[str, Any]) -> None:
    _whole(values, "world_size", 1, _MOST_RANKS)
    for name in ("rank", "token_group"):
        _whole(values, name, 0, values["world_size"] - 1)


def _left_out(values: Mapping[str, Any]) -> LeftOut:
    counts = _known(LeftOut, values)
    for name in counts:
        _whole(counts, name, 0)
    return LeftOut(**counts)


def _routers(several: Iterable[Mapping[str, Any]]) -> tuple[TracedRouter, ...]:
    routers = tuple(map(_router, several))
    if len({router.key for router in routers}) < len(routers):
        raise ValueError("two of its routers have one key")
    return routers


def _router(values: Mapping[str, Any]) -> TracedRouter:
    _whole(values, "num_experts", 1, MOST_EXPERTS)
    return TracedRouter(**{**_known(TracedRouter, values), "key": RouterKey.parse(values["key"])})


def _whole(values: Mapping[str, Any], name: str, least: int, most: int = 2**63 - 1) -> None:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name!r} is {value!r}; expected a whole number, {least} to {most}")


def _known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(cls)}
    return {name: value for name, value in values.items() if name in names}

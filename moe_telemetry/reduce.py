"""Agree with the other ranks once, then add up everybody's counts with one collective a time."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moe_telemetry.config import TelemetryConfig, run_id_of_launcher
from moe_telemetry.errors import ReductionError
from moe_telemetry.expert_parallel import place_experts
from moe_telemetry.identity import RouterKey
from moe_telemetry.packing import Layout, Packing, Reduced
from moe_telemetry.taps import Tap
from moe_telemetry.topology import Ranks, Seat, node_of_this_process, seat_ranks
from moe_telemetry.trace.manifest import TracedRouter

__all__ = ["Reducer", "introduce"]

_logger = logging.getLogger("moe_telemetry")
_IMPATIENT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a rank tells the others when it attaches."""

    node: str
    every_n_steps: int
    scores: bool
    run: str
    routers: Mapping[RouterKey, int]
    traced: Mapping[RouterKey, Mapping[str, Any]]
    error: str | None = None


def introduce(
    ranks: Ranks, config: TelemetryConfig, routers: Sequence[TracedRouter], error: Exception | None
) -> tuple[Seat, Layout, str]:
    """Exchange what every rank found, and return this rank's seat, the common layout and the run id.

    A rank that failed to attach still comes here, so that all ranks fail together.

    Raises:
        ReductionError: a rank does not come within the time-out, failed itself, or has other settings.
        ConfigError: the experts of a router cannot lie on expert-parallel ranks as the settings say.
    """
    if missing := ranks.meet("watch", config.rank_timeout_seconds):
        raise ReductionError(
            f"watch() waited {config.rank_timeout_seconds:g} s for rank {_list(missing)} in vain: call it on every rank"
        )
    mine = Introduction(
        node=node_of_this_process(),
        every_n_steps=config.every_n_steps,
        scores=config.scores,
        run=config.run or run_id_of_launcher() or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        routers={router.key: router.num_experts for router in routers},
        traced={router.key: asdict(router) for router in routers},
        error=None if error is None else f"{type(error).__name__}: {error}",
    )
    everyone: list[Introduction] = [Introduction(**values) for values in ranks.gather(asdict(mine))]
    if error is not None:
        raise error
    _check_agreement(everyone)
    seat = seat_ranks([other.node for other in everyone], ranks.rank)
    union = _union(everyone)
    _check_placement(union, config)
    layout = Layout(
        routers=union,
        stages=("train", "eval"),
        has_scores=config.scores,
        traced=tuple(TracedRouter(**_first_of(everyone, key)) for key in union),
    )
    return seat, layout, everyone[0].run


def _check_agreement(everyone: Sequence[Introduction]) -> None:
    for rank, other in enumerate(everyone):
        if other.error is not None:
            raise ReductionError(f"watch() failed on rank {rank}: {other.error}")
        for name in ("every_n_steps", "scores"):
            value, first = getattr(other, name), getattr(everyone[0], name)
            if value != first:
                raise ReductionError(
                    f"{name} differs: {first} on rank 0, {value} on rank {rank}; set the same on every rank"
                )


def _check_placement(routers: Mapping[RouterKey, int], config: TelemetryConfig) -> None:
    if config.expert_parallel_ranks is not None:
        for num_experts in set(routers.values()):
            place_experts(num_experts, config.expert_parallel_ranks, config.expert_placement)


def _union(everyone: Sequence[Introduction]) -> dict[RouterKey, int]:
    first_rank: dict[RouterKey, int] = {}
    union: dict[RouterKey, int] = {}
    for rank, other in enumerate(everyone):
        for key, num_experts in other.routers.items():
            if union.setdefault(key, num_experts) != num_experts:
                raise ReductionError(
                    f"router {key} has {union[key]} experts on rank {first_rank[key]} and {num_experts} on rank {rank}"
                )
            first_rank.setdefault(key, rank)
    return {key: union[key] for key in sorted(union, key=lambda key: key.order)}


def _first_of(everyone: Sequence[Introduction], key: RouterKey) -> Mapping[str, Any]:
    return next(other.traced[key] for other in everyone if key in other.traced)


class Reducer:
    """Adds up the counts of all ranks; every rank calls it at the same steps."""

    def __init__(self, ranks: Ranks, seat: Seat, layout: Layout, taps: Sequence[Tap], config: TelemetryConfig) -> None:
        self._ranks = ranks
        self._seat = seat
        self._taps = taps
        self._counts = ranks.first_of(config.token_replicas)
        self._patience = self._full_patience = config.rank_timeout_seconds
        self.num_skipped = 0
        self.layout = layout
        self._packing: Packing | None = None

    def reduce(self, meeting: str, step: int, slots: Mapping[str, int], *, is_last: bool = False) -> Reduced | None:
        """Return the counts of all ranks since the start, or None where a rank did not come in time.

        What a skipped reduction would have brought comes with the next one, if there is one: counters only grow.
        """
        if reason := self._obstacle(meeting):
            self.num_skipped += 1
            self._patience = min(self._patience, _IMPATIENT_SECONDS)
            outcome = "what was counted since the last export is in none" if is_last else "nothing is lost"
            _logger.warning("moe_telemetry: %s: skipped; %s, and training is not held up", reason, outcome)
            return None
        self._patience = self._full_patience
        reduced = self._add_up(step, slots)
        if reduced.has_new_stages:
            self._learn_stages(slots)
            reduced = self._add_up(step, slots)
        if not reduced.steps_agree:
            _logger.warning("moe_telemetry: ranks report different steps; this rank says %d", step)
        return reduced

    def hurry(self) -> None:
        """Wait a second at most from now on: this rank is ending."""
        self._patience = self._full_patience = min(self._full_patience, _IMPATIENT_SECONDS)

    def _obstacle(self, meeting: str) -> str | None:
        """Wait for all ranks, and return why they cannot reduce now; None where they can."""
        if not self._ranks.is_alive:
            return "the process group is destroyed already"
        if missing := self._ranks.meet(meeting, self._patience):
            return f"rank {_list(missing)} did not come to reduction {meeting!r} in {self._patience:g} s"
        return None

    def _add_up(self, step: int, slots: Mapping[str, int]) -> Reduced:
        if self._packing is None:
            self._packing = Packing(self.layout, self._taps, self._seat, self._ranks.device or self._home())
        vector = self._packing.pack(step, slots, counts=self._counts)
        self._ranks.sum_(vector)
        reduced = self._packing.unpack(vector)
        if not reduced.has_new_stages:
            self._packing.begin_peaks()
        return reduced

    def _home(self) -> torch.device:
        return self._taps[0].cells.device if self._taps else torch.device("cpu")

    def _learn_stages(self, slots: Mapping[str, int]) -> None:
        """Agree on stages that some rank has met since the last time; all ranks come here together."""
        known = list(self.layout.stages)
        names: set[str] = set().union(*self._ranks.gather(list(slots)))
        self.layout = replace(self.layout, stages=(*known, *sorted(names.difference(known))))
        self._packing = None


def _list(ranks: Sequence[Any]) -> str:
    return ", ".join(map(str, ranks))

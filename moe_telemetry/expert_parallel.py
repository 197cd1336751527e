"""Expert-parallel load: which rank holds which expert, and how evenly ranks are loaded.

A rank holds slots, numbered rank by rank; in each sits one (logical) expert, and a replicated expert
sits in several. Routers count logical experts, engines that move experts count slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from moe_telemetry.errors import ConfigError

__all__ = ["ExpertPlacement", "balancedness", "place_experts", "rank_balancedness", "straggler_factor"]


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts that each expert-parallel rank holds, in the order of its slots.

    Raises:
        ConfigError: no rank holds anything, or an expert of 0..E-1 is held by none.
    """

    experts_of_rank: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check that the experts are 0..E-1, each held at least once."""
        held = set(chain.from_iterable(self.experts_of_rank))
        if not held:
            raise ConfigError("expert placement is empty; expected for each rank the experts that it holds")
        if missing := set(range(max(held) + 1)) - held:
            raise ConfigError(f"expert placement: no rank holds expert {min(missing)} of 0..{max(held)}")
        if min(held) < 0:
            raise ConfigError(f"expert placement: expert {min(held)}; experts are numbered from 0")

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Give each rank a block of E / R experts, in order.

        Raises:
            ConfigError: the experts do not divide into equal blocks.
        """
        if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
            raise ConfigError(f"{num_experts} experts on {num_ranks} ranks; expected equal blocks of at least one")
        return cls.of_slots(range(num_experts), num_ranks)

    @classmethod
    def of_slots(cls, expert_of_slot: Sequence[int], num_ranks: int) -> ExpertPlacement:
        """Read a physical-to-logical map, whose slots lie on the ranks in equal blocks.

        Raises:
            ConfigError: the slots do not divide into equal blocks, or an expert is missing.
        """
        if num_ranks < 1 or len(expert_of_slot) % num_ranks:
            raise ConfigError(f"{len(expert_of_slot)} slots on {num_ranks} ranks; expected equal blocks")
        size = len(expert_of_slot) // num_ranks
        return cls(tuple(tuple(expert_of_slot[rank * size : (rank + 1) * size]) for rank in range(num_ranks)))

    @property
    def num_experts(self) -> int:
        """E, the number of logical experts."""
        return max(self.expert_of_slot) + 1

    @property
    def expert_of_slot(self) -> tuple[int, ...]:
        """The logical expert in each slot: the physical-to-logical map."""
        return tuple(chain.from_iterable(self.experts_of_rank))

    def logical_load(self, slot_assignments: Sequence[int]) -> tuple[int, ...]:
        """Return assignments per logical expert from those per slot.

        Raises:
            ConfigError: there are not as many entries as slots.
        """
        self._check(slot_assignments, len(self.expert_of_slot), "slots")
        loads = [0] * self.num_experts
        for expert, load in zip(self.expert_of_slot, slot_assignments, strict=True):
            loads[expert] += load
        return tuple(loads)

    def slot_load(self, assignments: Sequence[int]) -> tuple[float, ...]:
        """Return the load expected in each slot from assignments per logical expert.

        The replicas of an expert are taken to share its load evenly.

        Raises:
            ConfigError: there are not as many entries as experts.
        """
        self._check(assignments, self.num_experts, "experts")
        replicas = Counter(self.expert_of_slot)
        return tuple(assignments[expert] / replicas[expert] for expert in self.expert_of_slot)

    def rank_load(self, slot_loads: Sequence[float]) -> tuple[float, ...]:
        """Return the load of each rank from that of each slot, counted or expected.

        Raises:
            ConfigError: there are not as many entries as slots.
        """
        self._check(slot_loads, len(self.expert_of_slot), "slots")
        loads = iter(slot_loads)
        return tuple(sum(next(loads) for _ in experts) for experts in self.experts_of_rank)

    def expected_rank_load(self, assignments: Sequence[int]) -> tuple[float, ...]:
        """Return the load expected on each rank from assignments per logical expert."""
        return self.rank_load(self.slot_load(assignments))

    def _check(self, values: Sequence[float], expected: int, what: str) -> None:
        if len(values) != expected:
            raise ConfigError(f"{len(values)} loads for a placement of {expected} {what}; expected one for each")


@lru_cache(maxsize=64)
def place_experts(num_experts: int, num_ranks: int, expert_of_slot: tuple[int, ...] | None = None) -> ExpertPlacement:
    """Return the placement that a map states, or that of contiguous blocks where there is no map.

    Raises:
        ConfigError: the experts or slots do not divide into equal blocks, or the map is for another number of experts.
    """
    if expert_of_slot is None:
        return ExpertPlacement.contiguous(num_experts, num_ranks)
    placement = ExpertPlacement.of_slots(expert_of_slot, num_ranks)
    if placement.num_experts != num_experts:
        raise ConfigError(f"expert placement is for {placement.num_experts} experts; expected {num_experts}")
    return placement


def rank_balancedness(rank_loads: Sequence[float]) -> float | None:
    """Return mean over max of the ranks' loads of one layer: 1 is balanced, 1 / R the worst; None of nothing."""
    largest = max(rank_loads, default=0)
    return sum(rank_loads) / len(rank_loads) / largest if largest else None


def balancedness(layers: Iterable[Sequence[float]]) -> float | None:
    """Return the mean of `rank_balancedness` over layers; layers without load take no part."""
    ratios = [ratio for loads in layers if (ratio := rank_balancedness(loads)) is not None]
    return sum(ratios) / len(ratios) if ratios else None


def straggler_factor(layers: Iterable[Sequence[float]]) -> float | None:
    """Return how many times longer the experts take than with balanced ranks, None of nothing.

    Ranks meet in every layer, so each layer takes as long as its most loaded rank: the sum of the
    layers' largest loads over the sum of their mean loads.
    """
    loaded = [loads for loads in layers if any(loads)]
    if not loaded:
        return None
    return sum(map(max, loaded)) / sum(sum(loads) / len(loads) for loads in loaded)

"""The ranks of a job: who shares a node, who exports, whose tokens count."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_telemetry.errors import ConfigError
from moe_telemetry.rendezvous import Rendezvous

__all__ = ["Ranks", "Seat", "node_of_this_process", "seat_ranks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """This rank's place in the job, agreed by all ranks."""

    rank: int = 0
    num_ranks: int = 1
    node: int = 0
    num_nodes: int = 1
    leads_node: bool = True
    """The lowest rank of its node: it serves the node's endpoint."""

    @property
    def leads_job(self) -> bool:
        """The lowest rank of all: it speaks for the job as a whole."""
        return self.rank == 0


def node_of_this_process(environ: Mapping[str, str] | None = None) -> str:
    """Return a text that the ranks of one node share; two launches on one host are two nodes."""
    variables = os.environ if environ is None else environ
    return f"{socket.gethostname()}/{variables.get('GROUP_RANK', '0')}"


def seat_ranks(nodes: Sequence[str], rank: int) -> Seat:
    """Seat this rank, given the node of every rank."""
    order = list(dict.fromkeys(nodes))
    return Seat(
        rank=rank,
        num_ranks=len(nodes),
        node=order.index(nodes[rank]),
        num_nodes=len(order),
        leads_node=nodes.index(nodes[rank]) == rank,
    )


class Ranks:
    """The process group that telemetry reduces over; without `torch.distributed`, this process alone."""

    _num_made: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(self, group: Any = None) -> None:  # noqa: ANN401  # a ProcessGroup, or None for the world
        self._group = group
        self.is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.rank = dist.get_rank(group) if self.is_distributed else 0
        self.num_ranks = dist.get_world_size(group) if self.is_distributed else 1
        if self.rank < 0:
            raise ConfigError(f"process_group={group!r}: rank {dist.get_rank()} is not in it; pass one that has it")
        self._rendezvous = self._make_rendezvous() if self.is_distributed else None

    def _make_rendezvous(self) -> Rendezvous:
        # the ranks of a group make their monitors on it in the same order, so the count names them alike
        members = tuple(dist.get_process_group_ranks(self._group or dist.group.WORLD))
        Ranks._num_made[members] += 1
        name = f"{Ranks._num_made[members]}/{'-'.join(map(str, members)) if len(members) < 9 else hash(members)}"
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # the job's store has no public name
        return Rendezvous(store, self.rank, self.num_ranks, name)

    def meet(self, meeting: str, timeout_seconds: float) -> list[int]:
        """Wait for all ranks; return those that did not come in time (`Rendezvous.meet`)."""
        return [] if self._rendezvous is None else self._rendezvous.meet(meeting, timeout_seconds)

    @property
    def is_alive(self) -> bool:
        """False once the process group that was there is destroyed."""
        return not self.is_distributed or dist.is_initialized()

    @property
    def device(self) -> torch.device | None:
        """The device that the group's collectives need their tensors on, None where any will do."""
        if not self.is_distributed:
            return None
        if "nccl" in str(dist.get_backend(self._group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def gather(self, value: object) -> list[Any]:
        """Return the `value` of every rank, on every rank."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def sum_(self, tensor: Tensor) -> None:
        """Add up `tensor` over all ranks, in place."""
        if self.is_distributed:
            dist.all_reduce(tensor, group=self._group)

    def first_of(self, replicas: Any) -> bool:  # noqa: ANN401  # a ProcessGroup or a sequence of global ranks
        """Tell whether this rank is the lowest of `replicas`, the ranks that see the same tokens.

        Raises:
            ConfigError: this rank is not one of them.
        """
        return self.lowest_of(replicas) == self.rank

    def lowest_of(self, replicas: Any) -> int:  # noqa: ANN401  # as above
        """Return the lowest rank, as this group numbers them, of `replicas`; None stands for this rank alone.

        Raises:
            ConfigError: this rank is not one of them.
        """
        if replicas is None or not self.is_distributed:
            return self.rank
        members = list(replicas) if isinstance(replicas, Sequence) else dist.get_process_group_ranks(replicas)
        if dist.get_rank() not in members:
            raise ConfigError(f"token_replicas={members}: rank {dist.get_rank()} is not among them; add it")
        ours = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        return min(ours.index(member) for member in members if member in ours)

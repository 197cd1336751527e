"""TracedCall: one router call on its way from the device to a file, and the memory that such calls may take."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_telemetry.identity import RouterKey

__all__ = ["Budget", "TracedCall", "leave_device"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedCall:
    """What is kept of one router call, in host memory once `wait` has returned.

    Letters: N rows that were kept, K experts chosen per token (top-k), E experts.
    """

    key: RouterKey
    stage: str
    microbatch: int
    num_tokens: int
    num_experts: int
    num_sequences: int
    """B sequences of `num_tokens // B` rows."""
    is_sorted: bool
    ids_NK: Tensor
    """As they were copied, of a narrow dtype: E or more, and -1 cast to it, stand for a choice that was not made."""
    valid_N: Tensor | None
    excess: Tensor | None
    """How many choices of a routing map are beyond K a token, and have no place in a row; None without a map."""
    tensors: Mapping[str, Tensor]
    """What the options ask for beside the routes, by the first part of `tensor_name`."""
    arrival: torch.cuda.Event | None = None
    """Reached when all tensors have left the device."""

    @property
    def num_bytes(self) -> int:
        """Memory that the call holds."""
        held = (self.ids_NK, self.valid_N, self.excess, *self.tensors.values())
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def wait(self) -> None:
        """Wait for the tensors to arrive; not on the training thread."""
        if self.arrival is not None:
            self.arrival.synchronize()


class Budget:
    """Bytes that may wait between the training thread and the disk; both threads account for theirs."""

    def __init__(self, num_bytes: int) -> None:
        self._limit = num_bytes
        self._used = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take some of it, if there is enough."""
        with self._lock:
            if self._used + num_bytes > self._limit:
                return False
            self._used += num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        """Return what was taken."""
        with self._lock:
            self._used -= num_bytes


def leave_device(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
    """Copy tensors of one device to host memory that nobody else writes to.

    From a CUDA device the copies are queued on the current stream and are there once the event is
    reached; the training thread does not wait for it. Other accelerators copy at once.
    """
    device = next(iter(tensors.values())).device
    if device.type != "cuda":
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}, None
    copies = {name: _to_pinned(tensor) for name, tensor in tensors.items()}
    # a blocking event lets the thread that waits for it sleep
    arrival = torch.cuda.Event(blocking=True)
    arrival.record(torch.cuda.current_stream(device))
    return copies, arrival


def _to_pinned(tensor: Tensor) -> Tensor:
    # pinned memory comes from torch's cache, which gives a block out again when its copies are over
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)

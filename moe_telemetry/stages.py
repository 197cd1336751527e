"""Which stage counts now, as device scalars: they hold in compiled code and in replayed graphs too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_telemetry.counters import UNCOUNTED_SLOT, slot_value
from moe_telemetry.errors import ConfigError

__all__ = ["StageSlots"]


class StageSlots:
    """Which slot of the cells counts now: one device scalar for training mode, one for evaluation."""

    def __init__(self) -> None:
        self.names = ["train", "eval"]
        self._slots: tuple[int, int] = (0, 1)
        self._scalars: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def is_paused(self) -> bool:
        """Whether calls count nowhere now."""
        return self._slots[0] == UNCOUNTED_SLOT

    def name(self, *, training: bool) -> str | None:
        """Return the stage that a call counts under now, None where it counts nowhere; asked when a call runs."""
        slot = self._slots[0 if training else 1]
        return None if slot == UNCOUNTED_SLOT else self.names[slot]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the (train, eval) scalars on `device`; they keep their address for ever."""
        if device not in self._scalars:
            with torch.inference_mode(mode=False):
                self._scalars[device] = tuple(
                    torch.full((), slot_value(slot), dtype=torch.int64, device=device) for slot in self._slots
                )  # type: ignore[assignment]
        return self._scalars[device]

    def slot_of(self, name: str) -> int:
        """Return the slot of a stage, taking a free one for a new name.

        Raises:
            ConfigError: all slots are taken.
        """
        if name not in self.names:
            if len(self.names) == UNCOUNTED_SLOT:
                raise ConfigError(f"stage {name!r} is one too many; a monitor keeps {UNCOUNTED_SLOT}: {self.names}")
            self.names.append(name)
        return self.names.index(name)

    @contextmanager
    def all_to(self, slot: int) -> Iterator[None]:
        """Count everything within under one slot."""
        before = self._slots
        self._set((slot, slot))
        try:
            yield
        finally:
            self._set(before)

    def _set(self, slots: tuple[int, int]) -> None:
        self._slots = slots
        for scalars in self._scalars.values():
            for scalar, slot in zip(scalars, slots, strict=True):
                scalar.fill_(slot_value(slot))

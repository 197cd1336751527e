"""All ranks arrive, or none starts: the check before every collective.

A collective that one rank never enters cannot be interrupted, so no rank enters ours before all have
said in the job's key-value store that they are there. Waiting is on the store, and ends.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

__all__ = ["Rendezvous", "Store"]

_GO = b"go"
_GIVEN_UP = b"given up"


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Write a key."""

    def get(self, key: str, /) -> bytes:
        """Read a key that exists."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number and return it."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write a key if it holds `expected` (or, where that is empty, does not exist); return what it holds."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when the keys exist; raise when they do not in time."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class Rendezvous:
    """Meetings of the `num_ranks` ranks of a group, of which this process is number `rank`."""

    def __init__(self, store: Store, rank: int, num_ranks: int, name: str) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._prefix = f"moe_telemetry/{name}"
        self._past: list[str] = []

    def meet(self, meeting: str, timeout_seconds: float) -> list[int]:
        """Wait until every rank has come to `meeting`, and return the ranks that have not.

        Every rank gets the same verdict, also one that comes after the others have given up: either
        all go on, and the list is empty everywhere, or none does.
        """
        key = f"{self._prefix}/{meeting}"
        self._store.set(f"{self._prefix}/at/{self._rank}", meeting)
        verdict = self._verdict(key, timeout_seconds)
        self._forget(key)
        if verdict == _GO:
            return []
        return self._absent(meeting) or [self._rank]

    def _verdict(self, key: str, timeout_seconds: float) -> bytes:
        # whoever writes the verdict first decides for all: the last to arrive, or the first to give up
        if self._store.add(f"{key}/arrived", 1) == self._num_ranks:
            return self._store.compare_set(f"{key}/verdict", "", _GO.decode())
        try:
            self._store.wait([f"{key}/verdict"], timedelta(seconds=timeout_seconds))
        except RuntimeError:
            return self._store.compare_set(f"{key}/verdict", "", _GIVEN_UP.decode())
        return self._store.get(f"{key}/verdict")

    def _absent(self, meeting: str) -> list[int]:
        return [rank for rank in range(self._num_ranks) if self._last_meeting(rank) != meeting]

    def _last_meeting(self, rank: int) -> str | None:
        key = f"{self._prefix}/at/{rank}"
        # an empty value stands for a rank that has never come: get() would wait for it
        return self._store.compare_set(key, "", "").decode() or None

    def _forget(self, key: str) -> None:
        """Remove the keys of old meetings, so that the store does not grow with the run."""
        self._past.append(key)
        if len(self._past) > 2 and self._rank == 0:
            old = self._past.pop(0)
            self._store.delete_key(f"{old}/arrived")
            self._store.delete_key(f"{old}/verdict")

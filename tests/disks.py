"""A disk without room, for tests: files that cannot grow beyond a size."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size; a write across it is cut, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_for(condition: Callable[[], bool], timeout_seconds: float = 30.0) -> None:
    """Wait until something is so that another thread brings about."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)

"""Programs that a test starts, and does not leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tests.conftest import LAUNCHER_VARIABLES

Result = TypeVar("Result")


def child_environment() -> dict[str, str]:
    """The shell's environment without settings of telemetry and ids of launchers."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MOE_TELEMETRY_") and name not in LAUNCHER_VARIABLES
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, its output in a file, and kill it and its process group at the end."""
    with log.open("wb") as output:
        program = subprocess.Popen(
            command, stdout=output, stderr=output, env=child_environment(), start_new_session=True
        )
    try:
        yield program
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def wait_until(condition: Callable[[], Result], what: str, timeout_seconds: float = 90.0) -> Result:
    """Ask until the answer is true, and return it; what cannot connect yet is no answer."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            if answer := condition():
                return answer
        time.sleep(0.1)
    raise TimeoutError(f"{what}: not within {timeout_seconds} s")


def processes_with(argument_part: str) -> list[int]:
    """Ids of the processes, whoever started them, that have this text in their command line; Linux only."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if argument_part.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def kill_processes_with(argument_part: str) -> None:
    for process in processes_with(argument_part):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

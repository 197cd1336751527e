"""Start the demo's ranks, wait for them, and end them cleanly on Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from moe_telemetry.demo.options import DemoOptions
from moe_telemetry.errors import ConfigError, TelemetryError
from moe_telemetry.plugins import resolve_exporter
from moe_telemetry.snapshot import Snapshot

__all__ = ["launch", "usable_port"]

_PATIENCE_SECONDS = 30.0
_NUM_PORTS_TRIED = 100


def launch(options: DemoOptions, num_ranks: int) -> Snapshot:
    """Run the demo on `num_ranks` processes of this machine, and return the last snapshot.

    The run is named `demo-HHMMSS` (or as MOE_TELEMETRY_RUN says), and has a folder of that name in
    `options.logdir`. Ctrl-C lets the running step end, and then comes the end as always; a second one
    kills the ranks. A request to terminate, or the terminal going away, count as Ctrl-C.

    Raises:
        ConfigError: `transformers` is not installed.
        ExporterError: an exporter is unknown, or its package is missing.
        TelemetryError: the ranks failed, or were killed before the first snapshot.
    """
    _require_packages(options)
    run = os.environ.get("MOE_TELEMETRY_RUN") or time.strftime("demo-%H%M%S")
    with tempfile.TemporaryDirectory(prefix="moe-telemetry-demo-") as folder:
        stop_file, summary_file = Path(folder, "stop"), Path(folder, "summary")
        filled = replace(
            options,
            logdir=str(Path(options.logdir, run)),
            stop_file=str(stop_file),
            summary_file=str(summary_file),
        )
        exit_code = _run_ranks(_command(filled, num_ranks), run, stop_file)
        if exit_code or not summary_file.exists():
            raise TelemetryError(f"the demo's ranks ended with exit code {exit_code}; their output is above")
        return Snapshot.from_json(summary_file.read_text(encoding="utf-8"))


def _require_packages(options: DemoOptions) -> None:
    """Fail here in one line, where every rank would fail with a traceback."""
    if find_spec("transformers") is None:
        raise ConfigError("the demo needs transformers: pip install 'moe-telemetry[transformers]'")
    for name in options.exporters:
        resolve_exporter(name)


def _command(options: DemoOptions, num_ranks: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    return [*torchrun, "-m", "moe_telemetry.demo.worker", options.to_json()]


def _run_ranks(command: list[str], run: str, stop_file: Path) -> int:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ, "MOE_TELEMETRY_RUN": run}
    stop = _Stop(stop_file)
    with _handled_by(stop, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # a session of their own: Ctrl-C reaches this process alone, which asks the ranks to stop together
        ranks = subprocess.Popen(command, env=environment, start_new_session=True)
        while not stop.is_overdue:
            with suppress(subprocess.TimeoutExpired):
                return ranks.wait(0.2)
        return _kill(ranks)


class _Stop:
    """A signal handler: the first signal asks the ranks to stop, a second one has no patience left."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._deadline = float("inf")

    def __call__(self, _number: int, _frame: object) -> None:
        # an exception instead could come while the ranks are being started, and leave them running
        is_second = self._deadline < float("inf")
        self._deadline = time.monotonic() + (0 if is_second else _PATIENCE_SECONDS)
        self._file.touch()

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() >= self._deadline


@contextmanager
def _handled_by(handler: _Stop, *signals: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _kill(ranks: subprocess.Popen[bytes]) -> int:
    # torchrun gives each rank a session of its own and ends them when it is terminated: killing it
    # outright would leave them running
    ranks.terminate()
    with suppress(subprocess.TimeoutExpired):
        return ranks.wait(_PATIENCE_SECONDS)
    ranks.kill()
    return ranks.wait()


def usable_port(port: int) -> int:
    """Return the first port from `port` on that is free on the loopback address; for 0, any free one."""
    for candidate in range(port, min(port + _NUM_PORTS_TRIED, 65536)):
        if found := _bind(candidate):
            return found
    return _bind(0)


def _bind(port: int) -> int:
    """Return the port that can be listened on, 0 where it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
        return int(probe.getsockname()[1])

"""Start the demo's ranks, wait for them, and end them cleanly on Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from moe_telemetry.demo.options import DemoOptions
from moe_telemetry.errors import TelemetryError
from moe_telemetry.snapshot import Snapshot

__all__ = ["launch", "usable_port"]

_PATIENCE_SECONDS = 30.0


def launch(options: DemoOptions, num_ranks: int) -> Snapshot:
    """Run the demo on `num_ranks` processes of this machine, and return the last snapshot.

    Ctrl-C lets the running step end, and then comes the end as always; a second one kills the ranks.

    Raises:
        TelemetryError: the ranks failed, or were killed before the first snapshot.
    """
    with tempfile.TemporaryDirectory(prefix="moe-telemetry-demo-") as folder:
        stop_file, summary_file = Path(folder, "stop"), Path(folder, "summary")
        filled = replace(options, stop_file=str(stop_file), summary_file=str(summary_file))
        exit_code = _run_ranks(_command(filled, num_ranks), stop_file)
        if exit_code or not summary_file.exists():
            raise TelemetryError(f"the demo's ranks ended with exit code {exit_code}; their output is above")
        return Snapshot.from_json(summary_file.read_text(encoding="utf-8"))


def _command(options: DemoOptions, num_ranks: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    return [*torchrun, "-m", "moe_telemetry.demo.worker", options.to_json()]


def _run_ranks(command: list[str], stop_file: Path) -> int:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    # a session of their own: Ctrl-C reaches this process alone, which asks the ranks to stop together
    ranks = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return ranks.wait()
    except KeyboardInterrupt:
        stop_file.touch()
        try:
            return ranks.wait(_PATIENCE_SECONDS)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            os.killpg(ranks.pid, signal.SIGKILL)
            return ranks.wait()


def usable_port(port: int) -> int:
    """Return `port` where it is free on the loopback address, else a free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

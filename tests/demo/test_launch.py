"""Starting and ending the demo's ranks, without ranks."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from moe_telemetry import ConfigError, ExporterError
from moe_telemetry.demo import launch
from moe_telemetry.demo.options import DemoOptions
from tests.stack.processes import processes_with, wait_until

OBEDIENT = "import sys, time, pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
DEAF = "import time; time.sleep(60)"


def _run_and_signal(program: str, stop_file: Path, number: signal.Signals) -> int:
    """Run a program in place of the ranks, and send this process a signal once it is up."""
    pattern = str(stop_file)

    def send() -> None:
        wait_until(lambda: processes_with(pattern), "the program is up", 20)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    return launch._run_ranks([sys.executable, "-c", program, pattern], "test", stop_file)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_the_ranks_to_stop_together(tmp_path: Path, number: signal.Signals) -> None:
    assert _run_and_signal(OBEDIENT, tmp_path / "stop", number) == 0


def test_ranks_that_do_not_stop_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_PATIENCE_SECONDS", 0.2)
    assert _run_and_signal(DEAF, tmp_path / "stop", signal.SIGINT) == -signal.SIGTERM
    assert processes_with(str(tmp_path)) == []


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    insist = threading.Thread(
        target=lambda: wait_until(stop_file.exists, "the first signal") and os.kill(os.getpid(), signal.SIGINT)
    )
    insist.start()
    assert _run_and_signal(DEAF, stop_file, signal.SIGINT) == -signal.SIGTERM


def test_signals_mean_afterwards_what_they_meant_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    launch._run_ranks([sys.executable, "-c", ""], "test", tmp_path / "stop")
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_ranks_know_the_name_of_the_run(tmp_path: Path) -> None:
    program = "import os, sys; sys.exit(os.environ['MOE_TELEMETRY_RUN'] != 'demo-120000')"
    assert launch._run_ranks([sys.executable, "-c", program], "demo-120000", tmp_path / "stop") == 0


def test_a_missing_transformers_is_named_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install 'moe-telemetry\\[transformers\\]'"):
        launch.launch(DemoOptions(), 2)


def test_an_unknown_exporter_is_named_before_any_rank_starts() -> None:
    with pytest.raises(ExporterError, match="no exporter named 'grafana'"):
        launch.launch(DemoOptions(exporters=("grafana",)), 2)


def test_a_free_port_is_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert launch.usable_port(port) == port


def test_port_0_is_any_free_port() -> None:
    assert launch.usable_port(0) > 0


def test_no_free_port_up_to_the_last_one_gives_any(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = launch._bind
    monkeypatch.setattr(launch, "_bind", lambda port: 0 if port else bind(0))
    assert launch.usable_port(65535) > 0

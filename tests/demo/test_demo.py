"""`moe-telemetry demo`, run as a user runs it: on a terminal, in a script, to its end and interrupted."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from moe_telemetry.demo.text import batches, read_sources
from tests.stack.processes import (
    child_environment,
    free_port,
    kill_processes_with,
    processes_with,
    wait_until,
)

DEMO = [sys.executable, "-m", "moe_telemetry.cli", "demo"]
NUM_COLUMNS = 80
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass(frozen=True)
class Ended:
    """A demo that has ended."""

    exit_code: int
    stdout: str
    stderr: str
    left_over: list[int]

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.stdout)
        return summary


@contextmanager
def _demo(folder: Path, *arguments: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start the demo in a folder, and leave nothing of it at the end: the ranks are told of files in there."""
    environment = {**child_environment(), "TERM": "xterm-256color", "TMPDIR": str(folder)}
    with subprocess.Popen([*DEMO, *arguments], env=environment, cwd=folder, **streams) as demo:
        try:
            yield demo
        finally:
            demo.kill()
            kill_processes_with(str(folder))


def _end(demo: subprocess.Popen[bytes], folder: Path) -> Ended:
    stdout, stderr = demo.communicate(timeout=120)
    return Ended(demo.returncode, stdout.decode(), stderr.decode(), processes_with(str(folder)))


def _has_ended(demo: subprocess.Popen[bytes]) -> bool:
    return demo.poll() is not None


def _piped(folder: Path, *arguments: str) -> Any:
    return _demo(folder, "--json", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _tokens_by_mask(num_batches: int, num_ranks: int) -> int:
    """Real tokens in the first batches of every rank."""
    cut = {"batch_size": 8, "sequence_length": 128, "num_ranks": num_ranks}
    streams = [batches(read_sources(), rank=rank, **cut) for rank in range(num_ranks)]
    return sum(int(mask.sum()) for stream in streams for _, mask in islice(stream, num_batches))


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read().decode())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A demo that came to its end by itself."""
    folder = tmp_path_factory.mktemp("finished")
    with _piped(folder, "--steps", "7", "--every", "3", "--port", str(free_port())) as demo:
        return _end(demo, folder)


def test_the_demo_ends_by_itself_and_leaves_no_process(finished: Ended) -> None:
    assert (finished.exit_code, finished.stderr, finished.left_over) == (0, "", [])


def test_json_has_the_tokens_that_the_masks_say(finished: Ended) -> None:
    expected = _tokens_by_mask(7, num_ranks=2)
    assert expected < 2 * 7 * 8 * 128, "no padding: the test says nothing about masks"
    assert finished.summary["tokens"] == {"train": expected}


def test_json_names_the_run_its_layers_and_hottest_experts(finished: Ended) -> None:
    summary = finished.summary
    assert re.fullmatch(r"demo-\d{6}", summary["run"])
    assert (summary["steps"], summary["ranks"]) == (7, 2)
    assert list(summary["layers"]) == ["decoder.1", "decoder.2", "decoder.3"]
    assert len(summary["hottest_experts"]) == 5
    assert summary["export_errors"] == {"prometheus": 0, "tensorboard": 0}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A demo that was asked to stop in the middle of training."""
    folder, port = tmp_path_factory.mktemp("interrupted"), free_port()
    with _piped(folder, "--steps", "100000", "--every", "1", "--port", str(port)) as demo:
        wait_until(lambda: _has_ended(demo) or "moe_telemetry_step{" in _scrape(port), "a step is exported")
        demo.send_signal(signal.SIGINT)
        return _end(demo, folder)


def test_ctrl_c_ends_training_early_and_cleanly(interrupted: Ended) -> None:
    assert (interrupted.exit_code, interrupted.stderr, interrupted.left_over) == (0, "", [])


def test_a_run_that_ended_early_has_counted_every_step_it_took(interrupted: Ended) -> None:
    steps = interrupted.summary["steps"]
    assert 1 <= steps < 1000
    num_evaluated = steps // 25
    if num_evaluated == 0:
        assert interrupted.summary["tokens"] == {"train": _tokens_by_mask(steps, num_ranks=2)}
    total = sum(interrupted.summary["tokens"].values())
    assert total == _tokens_by_mask(steps + num_evaluated, num_ranks=2)


@dataclass(frozen=True)
class OnTerminal:
    """What a user of `demo --serve` sees whose port is taken, until Ctrl-C."""

    exit_code: int
    screen: str
    taken: int
    port: int
    scraped: str
    left_over: list[int]

    @property
    def lines(self) -> list[str]:
        echo_of_ctrl_c = "^C"  # stands where the cursor was, after the table
        return re.split(r"[\r\n]+", ESCAPES.sub("", self.screen.replace(echo_of_ctrl_c, "")))


@pytest.fixture(scope="module")
def on_terminal(tmp_path_factory: pytest.TempPathFactory) -> OnTerminal:
    folder = tmp_path_factory.mktemp("on_terminal")
    arguments = ["--steps", "4", "--every", "2", "--serve"]
    with socket.create_server(("127.0.0.1", 0)) as occupant, _terminal() as (terminal, ours, seen):
        taken = occupant.getsockname()[1]
        streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal, "preexec_fn": _take_terminal}
        with _demo(folder, *arguments, "--port", str(taken), start_new_session=True, **streams) as demo:
            wait_until(lambda: _has_ended(demo) or b"Ctrl-C.\r\n" in seen, "training is over")
            port = int(_found(rb"127\.0\.0\.1:(\d+)/metrics", seen))
            scraped = _scrape(port)
            os.write(ours, b"\x03")  # Ctrl-C, as the keyboard sends it
            exit_code = demo.wait(60)
            left_over = processes_with(str(folder))
        wait_until(lambda: b"all metrics" in seen, "the summary is on the screen", 10)
    return OnTerminal(exit_code, seen.decode(), taken, port, scraped, left_over)


@contextmanager
def _terminal() -> Iterator[tuple[int, int, bytearray]]:
    """Open a terminal; yield its end for programs, ours, and what it has shown so far."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, NUM_COLUMNS, 0, 0))
    seen = bytearray()
    reader = Thread(target=_read_all, args=(ours, seen), daemon=True)
    reader.start()
    try:
        yield terminal, ours, seen
    finally:
        os.close(terminal)  # the reader's end of file
        reader.join(10)
        os.close(ours)


def _read_all(descriptor: int, seen: bytearray) -> None:
    with suppress(OSError):
        while data := os.read(descriptor, 65536):
            seen += data


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _found(pattern: bytes, text: bytearray) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match.group(1).decode()


def test_serve_keeps_the_endpoint_up_after_training_until_ctrl_c(on_terminal: OnTerminal) -> None:
    assert re.search(r'^moe_telemetry_step\{run="demo-\d{6}"\} 4$', on_terminal.scraped, re.MULTILINE)
    assert (on_terminal.exit_code, on_terminal.left_over) == (0, [])
    assert "Traceback" not in on_terminal.screen
    with pytest.raises(OSError, match="refused"):
        _scrape(on_terminal.port)


def test_a_taken_port_is_named_and_the_next_free_one_is_used(on_terminal: OnTerminal) -> None:
    assert on_terminal.taken < on_terminal.port < on_terminal.taken + 100
    said = f"moe-telemetry: port {on_terminal.taken} is taken; the endpoint is at {on_terminal.port}"
    assert said in on_terminal.lines


def test_the_terminal_shows_a_table_and_then_a_summary(on_terminal: OnTerminal) -> None:
    tokens = f"{_tokens_by_mask(4, num_ranks=2):,}"
    assert any("layer" in line and "MaxVio" in line for line in on_terminal.lines)
    assert f"  tokens           {tokens} in train" in on_terminal.lines
    assert "Where to look next" in on_terminal.lines


def test_every_line_fits_a_terminal_of_80_columns(on_terminal: OnTerminal) -> None:
    assert max(map(len, on_terminal.lines)) <= NUM_COLUMNS
    assert not any("…" in line for line in on_terminal.lines)

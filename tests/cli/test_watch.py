"""`moe-telemetry watch`: a frame, a file, a terminal, JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import replace
from fcntl import ioctl
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from moe_telemetry import Snapshot
from moe_telemetry.cli import main
from moe_telemetry.cli.watch.source import Source
from moe_telemetry.cli.watch.view import Frame
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.live import LiveView
from moe_telemetry_exporters.prometheus import PrometheusExporter
from tests.cli.endpoints import address_of, as_of_now

ODD = '[red]a"b\x1b[2J{e}</script>,é'
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def _misaligned(snapshot: Snapshot) -> Snapshot:
    layers = {}
    for key, layer in snapshot.layers.items():
        counts = layer.window["train"]
        assert counts.replay is not None
        replay = replace(counts.replay, zero_overlap=counts.replay.checked // (key.layer + 2), shared_experts=0)
        layers[key] = replace(layer, window={"train": replace(counts, replay=replay)})
    return replace(snapshot, layers=layers)


# one frame


@pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/", "http://{}/metrics", "http://{}/live.json"])
def test_any_form_of_the_address_is_understood(
    exporter: PrometheusExporter, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter.export(as_of_now(make_snapshot()))
    assert main(["watch", form.format(address_of(exporter)), "--once"]) == 0
    assert capsys.readouterr().out.startswith("run-1  live  step 10")


def test_a_frame_has_every_layer_with_the_numbers_of_the_snapshot(
    exporter: PrometheusExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter.export(as_of_now(make_snapshot(num_layers=61, replayed=True)))
    assert main(["watch", address_of(exporter), "--once"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" decoder.")]
    assert [row[0] for row in rows] == [f"decoder.{layer}" for layer in range(61)]
    document = Source(address_of(exporter)).fetch()
    assert [row[2].lstrip("!") for row in rows] == [f"{layer['max_violation']:.2f}" for layer in document["layers"]]


def test_alerts_come_first_one_line_a_rule_with_the_worst_layer(
    exporter: PrometheusExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter.export(as_of_now(_misaligned(make_snapshot(replayed=True))))
    main(["watch", address_of(exporter), "--once"])
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(line.strip() for line in lines[2:6])
    assert re.search(r"critical  MoeReplayZeroOverlapHigh \(pending, \d+ s of 2 min\)  50\.0% of the", text)
    assert "replayed tokens of decoder.0 share no expert" in text
    assert "and 2 more" in text
    row = next(line for line in lines if line.startswith(" decoder.1"))
    assert "!0.0%" in row


def test_a_layer_and_a_stage_can_be_chosen(exporter: PrometheusExporter, capsys: pytest.CaptureFixture[str]) -> None:
    exporter.export(as_of_now(make_snapshot(stages=("train", "eval"))))
    main(["watch", address_of(exporter), "--json", "--stage", "eval", "--layer", "decoder.2"])
    document = json.loads(capsys.readouterr().out)
    assert (document["stage"], document["curves"]["layer"]) == ("eval", "decoder.2")


def test_before_the_first_snapshot_it_says_so(exporter: PrometheusExporter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", address_of(exporter), "--once"]) == 0
    assert "the run has exported nothing yet" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
@pytest.mark.parametrize("experts", [1, 3, 64, 300])
def test_no_line_of_a_screen_is_wider_than_the_terminal(columns: int, experts: int) -> None:
    view = LiveView()
    for step in (10, 20):
        view.show(_misaligned(make_snapshot(step=step, num_layers=61, num_experts=experts, top_k=1, replayed=True)))
    console = Console(file=StringIO(), force_terminal=True, width=columns, height=40, record=True)
    console.print(Frame(view.document(), is_bounded=True))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) <= 40


def test_text_of_the_user_is_neither_markup_nor_a_command_to_the_terminal(
    exporter: PrometheusExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter.export(as_of_now(make_snapshot(run=ODD, stages=("train", ODD))))
    main(["watch", address_of(exporter), "--once"])
    printed = capsys.readouterr().out
    assert "[red]a" in printed
    assert "\x1b" not in printed


def test_text_that_turns_the_direction_of_what_follows_is_taken_out() -> None:
    view = LiveView()
    view.show(make_snapshot(run="run \u202e1\u2066"))
    assert "\u202e" not in _text_of(view, columns=80)


def test_a_long_name_of_a_run_leaves_the_state_on_the_screen() -> None:
    view = LiveView()
    view.show(make_snapshot(run="x" * 300))
    first = _text_of(view, columns=40).splitlines()[0]
    assert first.startswith("xxx")
    assert "  live" in first


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 140])
def test_a_narrow_table_has_fewer_columns_and_none_is_cut(columns: int) -> None:
    view = LiveView()
    view.show(_misaligned(make_snapshot(num_layers=12, num_experts=64, replayed=True)))
    table = _text_of(view, columns=columns, lines=200).split(" layer ")[1]
    assert "…" not in table
    titles = table.splitlines()[0].split()
    # what an alert is about is the last to go
    assert "agree" in titles
    assert len(titles) == 13 or columns < 140


def test_without_colours_there_is_no_heatmap() -> None:
    view = LiveView()
    view.show(make_snapshot())
    assert "▀" in _text_of(view, columns=80)
    assert "▀" not in _text_of(view, columns=80, no_color=True)


def _text_of(view: LiveView, *, columns: int, lines: int = 40, **options: Any) -> str:
    console = Console(
        file=StringIO(),
        force_terminal=True,
        color_system="truecolor",
        width=columns,
        height=lines,
        record=True,
        **options,
    )
    console.print(Frame(view.document(), is_bounded=True))
    return console.export_text()


def test_a_terminal_without_unicode_gets_plain_characters(exporter: PrometheusExporter) -> None:
    for step in (10, 20):
        exporter.export(as_of_now(make_snapshot(step=step, seed=step, run="é漢")))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "moe_telemetry.cli", "watch", "--once", address_of(exporter)]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    printed = done.stdout.decode("ascii")
    assert printed.startswith("??  live  step 20")
    assert re.search(r"MaxVio +\d\.\d\d  [_#]{2}", printed)


# until Ctrl-C


def _watch(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moe_telemetry.cli", "watch", "--every", "0.1", *arguments]
    return subprocess.Popen(command, **options)


class _Output:
    """What a program has written so far; `until` waits for a text."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""

    def until(self, pattern: str) -> str:
        deadline = time.monotonic() + 60
        while not re.search(pattern, CODES.sub("", self.text)):
            assert time.monotonic() < deadline, f"{pattern!r} did not come; there is {self.text[-2000:]!r}"
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self.text += os.read(self._descriptor, 65536).decode(errors="replace")
        seen, self.text = self.text, ""
        return seen

    def until_end(self) -> str:
        """Read until the program has closed its side: one that nobody reads from waits for ever."""
        with suppress(OSError):  # which is how a terminal says so
            while chunk := os.read(self._descriptor, 65536):
                self.text += chunk.decode(errors="replace")
        return self.text


def test_a_file_gets_a_frame_for_every_new_snapshot_and_a_pause_of_the_endpoint_is_survived(
    exporter: PrometheusExporter,
) -> None:
    exporter.export(as_of_now(make_snapshot(step=10)))
    address = address_of(exporter)
    program = _watch(address, stdout=subprocess.PIPE)
    assert program.stdout is not None
    output = _Output(program.stdout.fileno())
    try:
        assert "\x1b" not in output.until("step 10[^Z]*decoder.2.*\n")
        exporter.export(as_of_now(make_snapshot(step=20)))
        output.until("step 20[^Z]*decoder.2.*\n")
        exporter.close()
        output.until(r"gone  step 20[^Z]*since \d\d:\d\d:\d\d: no endpoint at")
        again = PrometheusExporter(port=int(address.split(":")[1]))
        again.start()
        again.export(as_of_now(make_snapshot(step=30)))
        output.until("live  step 30[^Z]*decoder.2.*\n")
        again.close()
        program.send_signal(signal.SIGINT)
        assert program.wait(30) == 0
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_a_reader_that_has_seen_enough_ends_the_watch_without_an_error(exporter: PrometheusExporter) -> None:
    exporter.export(as_of_now(make_snapshot(step=10)))
    program = _watch(address_of(exporter), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    try:
        program.stdout.readline()
        program.stdout.close()
        exporter.export(as_of_now(make_snapshot(step=20)))
        assert program.stderr is not None
        assert program.stderr.read() == b""
        assert program.wait(30) == 0
        program.stderr.close()
    finally:
        program.kill()
        program.wait()


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 40)])
def test_a_terminal_shows_a_screen_that_renews_itself_and_leaves_the_last_frame(
    exporter: PrometheusExporter, columns: int, lines: int
) -> None:
    exporter.export(as_of_now(make_snapshot(step=10, num_layers=12, num_experts=64)))
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("COLUMNS", None)
    environment.pop("LINES", None)
    program = _watch(address_of(exporter), stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = _Output(ours)
    try:
        first = output.until("step 10[^Z]*more layers|step 10[^Z]*decoder.11")
        assert "\x1b[?1049h" in first
        assert "▀" in first or lines == 24
        exporter.export(as_of_now(make_snapshot(step=20, num_layers=12, num_experts=64)))
        screen = output.until("step 20[^Z]*more layers|step 20[^Z]*decoder.11")
        # where the cursor is sent to the top, a new screen begins
        screen = CODES.sub("", re.sub(r"\x1b\[[0-9;]*H", "\n", screen))
        assert max(map(len, screen.splitlines())) <= columns
        program.send_signal(signal.SIGINT)
        _, left_screen, last = output.until_end().partition("\x1b[?1049l")
        assert left_screen
        assert re.search(r"(?s)step 20.*decoder\.11", CODES.sub("", last))
        assert program.wait(30) == 0
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def test_watching_needs_no_torch(exporter: PrometheusExporter) -> None:
    exporter.export(as_of_now(make_snapshot()))
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from moe_telemetry.cli import main\n"
        f"sys.exit(main(['watch', '{address_of(exporter)}', '--once']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "decoder.2" in done.stdout

"""ConsoleExporter: a table on a terminal, a line a snapshot elsewhere."""

from __future__ import annotations

import io
import logging
import re
from dataclasses import replace

import pytest
from rich.console import Console

from moe_telemetry import ConfigError, RouterKey, Snapshot
from moe_telemetry.records import Counts, LayerSnapshot
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.console import ConsoleExporter


def _snapshot(*assignments: tuple[int, ...], step: int = 10) -> Snapshot:
    """A snapshot whose layers 1, 2, ... have these loads in window and total; top-1, so tokens are their sum."""
    layers = {}
    for number, loads in enumerate(assignments, 1):
        counts = {"train": Counts(tokens=sum(loads), assignments=loads)}
        layers[RouterKey("decoder", number)] = LayerSnapshot(
            num_experts=len(loads), total=counts, window=counts, share={}
        )
    return replace(make_snapshot(step=step, num_layers=0), layers=layers)


def _plain(*snapshots: Snapshot) -> list[str]:
    stream = io.StringIO()
    exporter = ConsoleExporter(stream=stream)
    for snapshot in snapshots:
        exporter.export(snapshot)
    exporter.close()
    return stream.getvalue().splitlines()


def _last_screen(*snapshots: Snapshot, height: int = 60, max_rows: int = 24) -> str:
    """What a terminal without colours shows after the last snapshot."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system=None, width=110, height=height)
    exporter = ConsoleExporter(console=console, max_rows=max_rows)
    for snapshot in snapshots:
        exporter.export(snapshot)
    text = stream.getvalue()
    exporter.close()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text[text.rindex("run ") :])


def test_without_a_terminal_a_snapshot_is_one_line() -> None:
    first, second = _plain(_snapshot((0, 3, 3, 2), (2, 2, 2, 2)), _snapshot((0, 3, 3, 2), (2, 2, 2, 2), step=14))
    assert first == (
        "moe-telemetry: run run-1 step 10: train 8 tokens, worst MaxVio 0.50 in decoder.1, "
        "lowest entropy 0.781, dead experts 1, hottest decoder.1/1 (37.5%)"
    )
    assert "train 8 tokens, 2 tokens/s," in second


def test_a_line_is_not_wrapped_and_not_coloured() -> None:
    (line,) = _plain(make_snapshot(run="a-very-long-name-" * 20))
    assert "\x1b" not in line
    assert len(line) > 340


def test_what_would_end_the_line_or_colour_it_is_not_written() -> None:
    (line,) = _plain(make_snapshot(run="a\nb\x1b[31m\udcff é漢"))
    assert line.startswith("moe-telemetry: run a?b?[31m? é漢 step 10: ")


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_encoding_of_the_stream_does_not_have_is_replaced(encoding: str, *, terminal: bool) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding)
    exporter = ConsoleExporter(console=Console(file=stream, force_terminal=terminal, width=110, height=40))
    exporter.export(make_snapshot(run="漢1"))
    exporter.close()
    stream.flush()
    assert b"run ?1" in written.getvalue()


def test_a_window_without_tokens_is_no_line() -> None:
    assert len(_plain(make_snapshot(), make_snapshot(step=20, window_steps=0))) == 1


def test_every_stage_of_a_window_is_a_line() -> None:
    lines = _plain(make_snapshot(stages=("train", "eval")))
    assert [line.split(":")[2].split()[0] for line in lines] == ["train", "eval"]


def test_log_lines_come_above_the_table_and_handlers_get_their_stream_back(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system=None, width=110, height=40)
    logger, handler = logging.getLogger("tests.console"), logging.StreamHandler()
    before = handler.stream
    logger.addHandler(handler)
    try:
        exporter = ConsoleExporter(console=console)
        exporter.export(make_snapshot())
        logger.warning("a sentence of the program")
        exporter.export(make_snapshot(step=20))
        assert "a sentence of the program" in stream.getvalue()
        assert stream.getvalue().index("a sentence of the program") < stream.getvalue().rindex("decoder.0")
        exporter.close()
        assert handler.stream is before
        logger.warning("afterwards")
    finally:
        logger.removeHandler(handler)
    assert capsys.readouterr().err == "afterwards\n"
    assert "afterwards" not in stream.getvalue()


def test_the_table_shows_tokens_maxvio_entropy_dead_and_hottest_experts() -> None:
    screen = _last_screen(_snapshot((0, 3, 3, 2), (2, 2, 2, 2)))
    assert "run run-1  step 10  tokens train 8" in screen
    rows = [line.replace("\u00a0", " ").split(maxsplit=5) for line in screen.splitlines() if "decoder" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["decoder.1", "8", "0.50", "0.781", "1", "1 (37.5%)  2 (37.5%)  3 (25.0%)"],
        ["decoder.2", "8", "0.00", "1.000", "0", "0 (25.0%)  1 (25.0%)  2 (25.0%)"],
    ]


def test_the_rate_comes_with_the_second_snapshot() -> None:
    first, second = _snapshot((4, 4)), _snapshot((4, 4), step=12)
    assert "tokens/s" not in _last_screen(first)
    assert "4 tokens/s" in _last_screen(first, second)


def test_the_worst_layer_stands_out() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=110, height=40)
    exporter = ConsoleExporter(console=console)
    exporter.export(_snapshot((2, 2, 2, 2), (0, 3, 3, 2)))
    exporter.close()
    red = [line for line in stream.getvalue().splitlines() if "\x1b[1;31m" in line]
    assert red
    assert all("decoder.2" in line for line in red)


@pytest.mark.parametrize(("height", "max_rows", "num_rows"), [(60, 24, 24), (60, 5, 5), (20, 24, 12)])
def test_of_61_layers_the_worst_are_shown_and_the_rest_counted(height: int, max_rows: int, num_rows: int) -> None:
    snapshot = make_snapshot(num_layers=61)
    screen = _last_screen(snapshot, height=height, max_rows=max_rows)
    rows = [line for line in screen.splitlines() if "decoder." in line]
    assert len(rows) == num_rows
    assert f"{61 - num_rows} more layers, each with a lower MaxVio" in screen
    assert len(screen.splitlines()) <= height


def test_the_last_table_stays_when_the_final_window_is_empty() -> None:
    screen = _last_screen(make_snapshot(), make_snapshot(step=20, window_steps=0))
    assert "step 20" in screen
    assert "decoder.0" in screen


def test_a_wrong_number_of_rows_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="max_rows=0"):
        ConsoleExporter(max_rows=0)

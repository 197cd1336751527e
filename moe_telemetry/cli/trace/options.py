"""Options that the commands on traces share, and where their figures go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from moe_telemetry.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moe_telemetry.analysis.pictures import Result

__all__ = ["add_engine", "add_outputs", "add_selection", "needs_extra", "put_out"]

_PACKAGES = {"fsspec", "matplotlib", "numpy", "pandas", "polars", "pyarrow"}


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add which tokens to look at."""
    parser.add_argument("--stage", metavar="NAME", help="only this stage, such as train (all, each by itself)")
    parser.add_argument(
        "--decode", action="store_true", help="only tokens whose sequence in their call is one token long"
    )
    parser.add_argument(
        "--steps", type=_steps, default=(None, None), metavar="A:B", help="only steps A up to B, B itself not (all)"
    )
    parser.add_argument("--top", type=_positive, metavar="N", help="experts that count as hot (an eighth of them)")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add what to compute on."""
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where to compute (local)")
    parser.add_argument(
        "--workers", type=_positive, default=1, metavar="N", help="processes of the local engine (1: no other)"
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add where the figures go."""
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write them as a long table")
    parser.add_argument("--png", type=Path, metavar="PATH", help="draw them: a file.png, or a folder for one each")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report that needs no other file")


def put_out(arguments: argparse.Namespace, result: Result, table: RenderableType, title: str) -> None:
    """Print the figures of a result and write the files that were asked for."""
    if arguments.csv is not None:
        _write(arguments.csv, result.columns().to_csv().encode())
    if arguments.png is not None or arguments.html is not None:
        _put_pictures(arguments, result, title)
    if arguments.json:
        print(json.dumps(result.as_dict(), indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console(file=sys.stdout)
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def needs_extra(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Have a command say which extra brings the package that it misses."""

    @wraps(run)
    def guarded(arguments: argparse.Namespace) -> int:
        try:
            if getattr(arguments, "png", None) or getattr(arguments, "html", None):
                import_module("moe_telemetry.analysis.pictures")  # before hours of counting, not after
            return run(arguments)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _PACKAGES:
                raise
            raise ConfigError(f"moe-telemetry trace needs {error.name}: pip install 'moe-telemetry[trace]'") from error

    return guarded


def _put_pictures(arguments: argparse.Namespace, result: Result, title: str) -> None:
    from moe_telemetry.analysis.pictures import draw, draw_as_one

    if (path := arguments.png) is not None:
        if path.suffix == ".png":
            _write(path, draw_as_one(result))
        else:
            for picture in draw(result):
                _write(path / f"{picture.name}.png", picture.png)
    if arguments.html is not None:
        from moe_telemetry.analysis.report import report

        _write(arguments.html, report(result, title).encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    print(f"written: {path}", file=sys.stderr)


def _steps(text: str) -> tuple[int | None, int | None]:
    first, colon, stop = text.partition(":")
    try:
        steps = (int(first) if first else None, int(stop) if stop else None)
    except ValueError:
        colon = ""
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r}: expected A:B, as in 100:200, 100: or :200")
    return steps


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)

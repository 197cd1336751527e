"""The command line `moe-telemetry`: one module a command, and `main`.

Every command exits with 0, with 1 where it found something wrong, and with 2 where it could not run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

from moe_telemetry._version import __version__
from moe_telemetry.cli import dashboards, demo, doctor, metrics, replay, rules, trace, wandb_workspace, watch
from moe_telemetry.errors import TelemetryError

__all__ = ["build_parser", "main"]

_COMMANDS = (dashboards, demo, doctor, metrics, replay, rules, trace, wandb_workspace, watch)


class _Parser(argparse.ArgumentParser):
    """A parser, and so are those of its commands, that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="moe-telemetry",
        description="See the routers of Mixture-of-Experts models.",
        epilog="Start with: moe-telemetry demo",
    )
    parser.add_argument("--version", action="version", version=f"moe-telemetry {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        # a terminal may have no character for a bar or a name: a question mark is no reason to end
        sys.stdout.reconfigure(errors="replace")
    arguments = build_parser().parse_args(argv)
    try:
        exit_code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader, such as `head`, has what it wants; what is buffered must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TelemetryError, OSError) as error:
        print(f"moe-telemetry: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return exit_code

"""The command line `moe-telemetry`: one module a command, and `main`.

Every command exits with 0, with 1 where it found something wrong, and with 2 where it could not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moe_telemetry._version import __version__
from moe_telemetry.cli import demo, doctor, metrics
from moe_telemetry.errors import TelemetryError

__all__ = ["build_parser", "main"]

_COMMANDS = (demo, doctor, metrics)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
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
    arguments = build_parser().parse_args(argv)
    try:
        exit_code: int = arguments.run(arguments)
    except (TelemetryError, OSError) as error:
        print(f"moe-telemetry: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return exit_code

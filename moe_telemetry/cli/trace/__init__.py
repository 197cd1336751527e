"""`moe-telemetry trace ...`: the commands on route traces."""

from __future__ import annotations

import argparse

from moe_telemetry.cli.trace import concentration, export, info, predictability

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the group of commands to the command line."""
    parser = subparsers.add_parser(
        "trace",
        help="look into route traces, and say which experts are hot and how predictable they are",
        epilog="Example: moe-telemetry trace info runs/trace",
    )
    commands = parser.add_subparsers(title="commands", dest="trace_command", required=True, metavar="COMMAND")
    for command in (info, export, concentration, predictability):
        command.add_parser(commands)

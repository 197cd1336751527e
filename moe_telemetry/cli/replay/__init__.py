"""`moe-telemetry replay ...`: the commands on route files."""

from __future__ import annotations

import argparse

from moe_telemetry.cli.replay import check

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the group of commands to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="work on files of expert routes",
        epilog="Example: moe-telemetry replay check rollout.safetensors trainer.safetensors",
    )
    commands = parser.add_subparsers(title="commands", dest="replay_command", required=True, metavar="COMMAND")
    check.add_parser(commands)

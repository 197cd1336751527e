"""`moe-telemetry trace info DIR`: what a trace holds, and what it left out."""

from __future__ import annotations

import argparse
import json

from moe_telemetry.cli.trace.options import needs_extra

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "info",
        help="what a trace holds: model, routers, steps, ranks, bytes, and what it left out",
        epilog="Example: moe-telemetry trace info runs/trace --json",
    )
    parser.add_argument("trace", help="folder of a trace, or its URL, such as s3://bucket/trace")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


@needs_extra
def run(arguments: argparse.Namespace) -> int:
    """Print what is there; exit with 1 where something is missing."""
    from rich.console import Console

    from moe_telemetry.analysis.inventory import take_inventory
    from moe_telemetry.cli.trace.tables import inventory_table

    found = take_inventory(arguments.trace)
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        console = Console()
        console.print(inventory_table(found))
        for note in found.notes:
            console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    return int(not found.is_complete or found.left_out.has_losses)

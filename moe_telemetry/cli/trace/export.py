"""`moe-telemetry trace export DIR --jsonl FILE`: a trace as JSON lines, for scripts that read them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_telemetry.cli.trace.options import needs_extra

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "export",
        help="write a trace as JSON lines: one object a step, router and rank",
        description="Padding is left out, and ranks that hold the same tokens appear once.",
        epilog="Example: moe-telemetry trace export runs/trace --jsonl -",
    )
    parser.add_argument("trace", help="folder of a trace, or its URL")
    parser.add_argument("--jsonl", required=True, metavar="FILE", help="file to write; - is the standard output")
    parser.set_defaults(run=run)


@needs_extra
def run(arguments: argparse.Namespace) -> int:
    """Write the lines."""
    from moe_telemetry.analysis.opening import open_source
    from moe_telemetry.trace.jsonl import write_jsonl
    from moe_telemetry.trace.reader import open_trace

    trace = open_source(open_trace(arguments.trace))
    # rank by rank, so that all calls of a step and rank come one after another
    rows = (row for part in trace.counted_parts for chunk in trace.chunks([part]) for row in trace.rows(chunk))
    if arguments.jsonl == "-":
        write_jsonl(rows, sys.stdout)
        return 0
    path = Path(arguments.jsonl)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        num_lines = write_jsonl(rows, file)
    print(f"written: {path}, {num_lines:,} lines", file=sys.stderr)
    return 0

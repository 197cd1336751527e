"""`moe-telemetry metrics`: the table of metrics."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from moe_telemetry.catalog import METRICS, Metric

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "metrics",
        help="list every metric with its labels and meaning",
        epilog="Example: moe-telemetry metrics --json",
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    if arguments.json:
        print(json.dumps([asdict(metric) for metric in METRICS.values()], indent=2))
        return 0
    for metric in METRICS.values():
        print(_paragraph(metric), end="\n\n")
    return 0


def _paragraph(metric: Metric) -> str:
    lines = [f"{metric.name} ({metric.kind}, {', '.join(metric.labels) or 'no labels'})", f"  {metric.help}"]
    return "\n".join([*lines, f"  Healthy: {metric.healthy}"] if metric.healthy else lines)

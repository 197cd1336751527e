"""`moe-telemetry watch`: the live page of an endpoint, in a terminal."""

from __future__ import annotations

import argparse
import json
import os

__all__ = ["add_parser", "run"]

_COLUMNS_OF_A_FILE = 120


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "watch",
        help="show a run's routers live: alerts, curves, load of every expert, layers",
        description="Show what the page of a run's Prometheus endpoint shows, in a terminal, until Ctrl-C. Where the "
        "output is no terminal, a frame is printed for every new snapshot.",
        epilog="Example: moe-telemetry watch 127.0.0.1:9464",
    )
    parser.add_argument("url", metavar="URL", help="the endpoint: 127.0.0.1:9464, https://user:password@node7:9464")
    parser.add_argument("--stage", metavar="NAME", help="show this stage (train, or the one with the most tokens)")
    parser.add_argument("--layer", metavar="ROUTER", help="curves of this router in place of the worst: decoder.3")
    parser.add_argument("--every", type=_seconds, default=2.0, metavar="SECONDS", help="time between two looks (2)")
    parser.add_argument("--once", action="store_true", help="print one frame, with all layers, and end")
    parser.add_argument("--json", action="store_true", help="print the data once, as JSON")
    parser.add_argument("--insecure", action="store_true", help="accept any certificate")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look once, or until Ctrl-C."""
    # rich and the client are loaded by this command alone
    from moe_telemetry.cli.watch.loop import Screen, Watch
    from moe_telemetry.cli.watch.source import Source
    from moe_telemetry.cli.watch.view import Frame

    source = Source(arguments.url, insecure=arguments.insecure, stage=arguments.stage, layer=arguments.layer)
    first = source.fetch()  # an endpoint that is not there at the start is an error; later it may be away for a while
    if arguments.json:
        print(json.dumps(first, indent=2))
        return 0
    console = Screen(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _COLUMNS_OF_A_FILE
    if arguments.once:
        console.print(Frame(first))
    else:
        Watch(source, first, seconds=arguments.every).run(console)
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds from 0.1 to 3600")
    return seconds

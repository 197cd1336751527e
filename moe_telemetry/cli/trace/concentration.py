"""`moe-telemetry trace concentration DIR [DIR2]`: how few experts do how much of the work."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from moe_telemetry.cli.trace.options import add_engine, add_outputs, add_selection, needs_extra, put_out

if TYPE_CHECKING:
    from moe_telemetry.analysis import Concentration

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "concentration",
        help="how much the hottest experts take, and whether they stay hot; the drift between two traces",
        description="For every router: experts in use, the share of the N hottest against that of a balanced router "
        "(N / E), and how many of a step's N hottest are so again in the next captured step.",
        epilog="Example: moe-telemetry trace concentration runs/trace --top 16 --html report.html",
    )
    parser.add_argument("trace", help="folder of a trace, its URL, or a file of JSON lines")
    parser.add_argument("later", nargs="?", help="another trace: how far its load lies from that of the first")
    parser.add_argument("--num-experts", type=int, metavar="E", help="experts a router, where JSON lines do not say")
    add_selection(parser)
    add_engine(parser)
    add_outputs(parser)
    parser.set_defaults(run=run)


@needs_extra
def run(arguments: argparse.Namespace) -> int:
    """Print the figures, and write what was asked for."""
    from moe_telemetry.analysis import concentration, drift
    from moe_telemetry.cli.trace.tables import concentration_table, drift_table

    def analyse(trace: str) -> Concentration:
        return concentration(
            trace,
            stage=arguments.stage,
            decode=arguments.decode,
            steps=arguments.steps,
            top=arguments.top,
            num_experts=arguments.num_experts,
            engine=arguments.engine,
            workers=arguments.workers,
        )

    found = analyse(arguments.trace)
    if arguments.later is None:
        put_out(arguments, found, concentration_table(found), "Expert concentration")
    else:
        moved = drift(found, analyse(arguments.later))
        put_out(arguments, moved, drift_table(moved), "Drift of expert load")
    return 0

"""`moe-telemetry trace predictability DIR`: is a layer's load known one layer early?"""

from __future__ import annotations

import argparse

from moe_telemetry.cli.trace.options import add_engine, add_outputs, add_selection, needs_extra, put_out

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "predictability",
        help="how well a router's choice is known from the hidden states of the layer before",
        description="Gives every router the hidden states that the router before it has seen, and compares what it "
        "would choose with what it chose: recall by token, and cosine, rank correlation and hottest experts of the "
        "load in a step; 'before' is the same with the load of the captured step before as the prediction. Needs a "
        "capture with hidden_states=True and router_weights=True.",
        epilog="Example: moe-telemetry trace predictability runs/trace --stage train --html report.html",
    )
    parser.add_argument("trace", help="folder of a trace, or its URL")
    add_selection(parser)
    add_engine(parser)
    add_outputs(parser)
    parser.set_defaults(run=run)


@needs_extra
def run(arguments: argparse.Namespace) -> int:
    """Print the figures, and write what was asked for."""
    from moe_telemetry.analysis import predictability
    from moe_telemetry.cli.trace.tables import predictability_table

    found = predictability(
        arguments.trace,
        stage=arguments.stage,
        decode=arguments.decode,
        steps=arguments.steps,
        top=arguments.top,
        engine=arguments.engine,
        workers=arguments.workers,
    )
    put_out(arguments, found, predictability_table(found), "Expert predictability")
    return 0

"""`moe-telemetry demo`: see the routers of a real model within a minute."""

from __future__ import annotations

import argparse
import json
import sys

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small Qwen3-MoE on this machine and watch its routers",
        description="Train a small Qwen3-MoE on the sources of Python's standard library, on two ranks, with a "
        "live table, a Prometheus endpoint and TensorBoard logs. Ends by itself; Ctrl-C ends it early.",
        epilog="Example: moe-telemetry demo --steps 300 --serve",
    )
    parser.add_argument(
        "--scenario",
        choices=("train", "replay", "shifted"),
        default="train",
        help="replay: train on the routes of a rollout in bfloat16; shifted: give them to the wrong tokens (train)",
    )
    parser.add_argument("--ranks", type=_positive, default=2, metavar="N", help="processes to train on (2)")
    parser.add_argument("--steps", type=_positive, default=150, metavar="N", help="optimizer steps (150)")
    parser.add_argument("--every", type=_positive, default=5, metavar="N", help="steps between two exports (5)")
    parser.add_argument("--port", type=_port, default=9464, metavar="N", help="port of the Prometheus endpoint (9464)")
    parser.add_argument("--logdir", default="runs/moe-demo", metavar="FOLDER", help="TensorBoard logs (runs/moe-demo)")
    parser.add_argument("--serve", action="store_true", help="keep the endpoint up after training, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print only the summary, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print its summary."""
    # torch-free start: the ranks import torch, this process does not
    from moe_telemetry.demo.launch import launch, usable_port
    from moe_telemetry.demo.options import DemoOptions
    from moe_telemetry.demo.report import as_json, as_text

    port = usable_port(arguments.port)
    if port != arguments.port and arguments.port:
        print(f"moe-telemetry: port {arguments.port} is taken; the endpoint is at {port}", file=sys.stderr)
    exporters = ("prometheus", "tensorboard") if arguments.json else ("console", "prometheus", "tensorboard")
    options = DemoOptions(
        scenario=arguments.scenario,
        warm_up_steps=min(50, arguments.steps // 2),
        steps=arguments.steps,
        every_n_steps=arguments.every,
        port=port,
        logdir=arguments.logdir,
        exporters=exporters,
        serve=arguments.serve,
    )
    if not arguments.json:
        print(f"Starting {arguments.ranks} ranks, which takes about 10 seconds. Ctrl-C ends the demo early.")
        print(f"Metrics will be at http://127.0.0.1:{port}/metrics")
        print(f"A live page will be at http://127.0.0.1:{port}/", flush=True)
    snapshot = launch(options, arguments.ranks)
    print(json.dumps(as_json(snapshot), indent=2) if arguments.json else as_text(snapshot, options))
    return 0


def _positive(text: str) -> int:
    return _whole_number(text, 1, None)


def _port(text: str) -> int:
    return _whole_number(text, 0, 65535)


def _whole_number(text: str, least: int, most: int | None) -> int:
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number {allowed}")
    return number

"""What each rank of the demo runs: train, watch, and report at the end."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from moe_telemetry.demo.options import DemoOptions
from moe_telemetry.demo.rollout import Rollout
from moe_telemetry.demo.text import batches, read_sources
from moe_telemetry.demo.training import Trainer, build_model
from moe_telemetry.monitor import watch
from moe_telemetry.snapshot import Snapshot

__all__ = ["main", "run"]

_BATCH_SIZE = 8
_SEQUENCE_LENGTH = 128


def run(options: DemoOptions, prepare: Callable[[nn.Module], object] | None = None) -> Snapshot:
    """Train on this rank, and return the last snapshot; `prepare` may hook the model before it is watched."""
    model = build_model()
    if prepare is not None:
        prepare(model)
    trainer = Trainer(model)
    text = batches(
        read_sources(),
        batch_size=_BATCH_SIZE,
        sequence_length=_SEQUENCE_LENGTH,
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
    )
    with watch(model, *options.exporters, every_n_steps=options.every_n_steps, per_expert=True) as monitor:
        is_shifted = options.scenario == "shifted"
        rollout = None if options.scenario == "train" else Rollout(model, monitor.routers, is_shifted=is_shifted)
        for step in range(1, options.steps + 1):
            if rollout is None or step <= options.warm_up_steps:
                trainer.train(next(text))
            else:
                batch = next(text)
                with monitor.replay(rollout.routes(model, batch)):
                    trainer.train(batch)
            if step % options.evaluate_every_n_steps == 0:
                trainer.evaluate(next(text))
            monitor.step(step)
            if _any_rank_stops(options):
                break
        snapshot = monitor.snapshot()
        _write_summary(options, snapshot)
        if options.serve:
            _serve(options)  # the monitor is still open, and with it the endpoint
    return snapshot


def _any_rank_stops(options: DemoOptions) -> bool:
    """Tell whether a rank has seen the stop file: all ranks end at the same step."""
    flag = torch.tensor([int(bool(options.stop_file) and Path(options.stop_file).exists())])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _write_summary(options: DemoOptions, snapshot: Snapshot) -> None:
    if dist.get_rank() == 0 and options.summary_file:
        Path(options.summary_file).write_text(snapshot.to_json(), encoding="utf-8")


def _serve(options: DemoOptions) -> None:
    if dist.get_rank() == 0 and not Path(options.stop_file).exists():
        # stderr: the launcher may have been asked for JSON on stdout
        address = f"http://127.0.0.1:{options.port}"
        print(f"Trained. {address}/ and /metrics stay up until Ctrl-C.", file=sys.stderr, flush=True)
    while not Path(options.stop_file).exists():
        time.sleep(0.2)


def main(argument: str, prepare: Callable[[nn.Module], object] | None = None) -> None:
    """Run one rank under torchrun, with the options as `DemoOptions.to_json` writes them."""
    options = DemoOptions.from_json(argument)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ["MOE_TELEMETRY_PROMETHEUS_PORT"] = str(options.port)
    os.environ["MOE_TELEMETRY_TENSORBOARD_LOGDIR"] = options.logdir
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run(options, prepare)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

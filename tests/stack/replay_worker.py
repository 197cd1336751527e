"""A small model that replays its own routes, each one row late: replay_worker.py PORT STOP_FILE."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import moe_telemetry as mt
from moe_telemetry.testing import TinyMoe
from moe_telemetry_exporters.prometheus import PrometheusExporter

NUM_SEQUENCES = 4
LENGTH = 64


def main(port: int, stop_file: Path) -> None:
    torch.manual_seed(0)
    model = TinyMoe()
    with mt.watch(model, PrometheusExporter(port=port), routers=model.routers, every_n_steps=1) as monitor:
        while not stop_file.exists():
            hidden_BSH = torch.randn(NUM_SEQUENCES, LENGTH, 16)
            with monitor.pause(), monitor.record() as recording:
                model(hidden_BSH)
            routes = recording.routes()
            late = routes.ids.unflatten(0, (NUM_SEQUENCES, LENGTH)).roll(1, dims=1).flatten(0, 1)
            with monitor.replay(mt.Routes(late, (LENGTH,) * NUM_SEQUENCES, routes.keys, model.num_experts)):
                model(hidden_BSH)
            monitor.step()
            time.sleep(0.2)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

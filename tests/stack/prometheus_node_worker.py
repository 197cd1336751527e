"""A job of two nodes of two ranks on one machine: prometheus_node_worker.py FOLDER PORT PORT PUSHGATEWAY_PORT.

Every rank counts by itself what its routers chose, writes that to FOLDER, and trains no more until FOLDER/stop is
there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes

import moe_telemetry as mt
from moe_telemetry.testing import TinyMoe
from moe_telemetry_exporters.prometheus import PrometheusExporter
from moe_telemetry_exporters.prometheus.pushgateway import PushgatewayExporter
from moe_telemetry_exporters.prometheus.textfile import PrometheusTextfileExporter

NUM_RANKS = 4
STEPS = 5
LENGTH = 8


def run_rank(rank: int, folder: str, ports: list[int], pushgateway: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    try:
        _train(rank, folder, ports, pushgateway)
    finally:
        dist.destroy_process_group()


def _train(rank: int, folder: str, ports: list[int], pushgateway: int) -> None:
    node = rank // 2
    os.environ["GROUP_RANK"] = str(node)
    (directory := Path(folder, f"node{node}")).mkdir(exist_ok=True)
    exporters = (
        PrometheusExporter(port=ports[node], linger_seconds=60),
        PrometheusTextfileExporter(directory=directory),
        PushgatewayExporter(url=f"http://127.0.0.1:{pushgateway}", interval_seconds=0),
    )
    model, counts = TinyMoe(), Counter[str]()
    torch.manual_seed(rank)
    with mt.watch(model, *exporters, routers=model.routers, every_n_steps=2, per_expert=True, run="nodes") as monitor:
        for step in range(STEPS):
            _forward(model, rank, step, counts)
            monitor.step(step + 1)
        monitor.step(STEPS + 1)  # the sixth reduces, and counts nothing
        Path(folder, f"counts{rank}.json").write_text(json.dumps(counts))
        while not Path(folder, "stop").exists():
            time.sleep(0.05)


def _forward(model: TinyMoe, rank: int, step: int, counts: Counter[str]) -> None:
    """Pass more sequences on a higher rank, each with another number of real tokens, and count them."""
    lengths_B = (torch.arange(rank + 1) * 3 + step) % LENGTH + 1
    mask_BS = (torch.arange(LENGTH) < lengths_B.unsqueeze(1)).long()
    hooks = [
        layer.gate.register_forward_hook(partial(_count, counts, index, mask_BS.flatten().bool()))
        for index, layer in enumerate(model.layers)
    ]
    model(torch.randn(rank + 1, LENGTH, 16), attention_mask=mask_BS)
    for hook in hooks:
        hook.remove()


def _count(
    counts: Counter[str], layer: int, mask_T: Tensor, _router: nn.Module, _args: object, output: tuple[Tensor, ...]
) -> None:
    ids_TK = output[2][mask_T]
    counts[f"tokens {layer}"] += len(ids_TK)
    counts[f"padding {layer}"] += int((~mask_T).sum())
    counts.update(f"expert {layer} {expert}" for expert in ids_TK.flatten().tolist())


if __name__ == "__main__":
    where, first, second, gateway = sys.argv[1:]
    torch.set_num_threads(1)
    # forks, for importing torch is most of the time of this test
    start_processes(run_rank, (where, [int(first), int(second)], int(gateway)), NUM_RANKS, start_method="fork")

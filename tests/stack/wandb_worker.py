"""What ranks do that train a small model watched by W&B."""

from __future__ import annotations

import torch

import moe_telemetry as mt
from moe_telemetry.testing import TinyMoe

STEPS = 4
TOKENS_A_STEP = 32


def train(rank: int) -> dict[str, int]:
    """Train for some steps and return the failures of every exporter; settings come from the environment."""
    torch.manual_seed(rank)
    model = TinyMoe()
    with mt.watch(model, "wandb", routers=model.routers, every_n_steps=1) as monitor:
        for _ in range(STEPS):
            model(torch.randn(2, TOKENS_A_STEP // 2, 16))
            monitor.step()
        monitor.close()
        return monitor._reporting.delivery.errors

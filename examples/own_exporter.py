"""An exporter of one's own: any object with export() and close()."""

from __future__ import annotations

import torch

import moe_telemetry as mt
from moe_telemetry.testing.models import TinyMoe


class DeadExpertReport:
    """Print the routers that left experts without a token in the last window."""

    def export(self, snapshot: mt.Snapshot, /) -> None:
        """Take one snapshot; called from a thread of its own, once a reduction."""
        dead = {
            f"{labels['block']}.{labels['layer']}": int(value)
            for name, labels, value in snapshot.samples()
            if name == "moe_load_dead_experts" and value > 0
        }
        print(f"step {snapshot.step}: dead experts: {dead or 'none'}")

    def close(self) -> None:
        """Nothing is buffered."""


def main() -> None:
    """Feed a few tokens to a small model, so that some experts stay idle."""
    model = TinyMoe(num_layers=3, num_experts=32)
    with mt.watch(model, DeadExpertReport(), routers=model.routers, every_n_steps=1) as monitor:
        for step in range(1, 4):
            model(torch.randn(1, 8 * step, 16))
            monitor.step(step)


if __name__ == "__main__":
    main()

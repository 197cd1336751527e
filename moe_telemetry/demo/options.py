"""What a user can choose about the demo, and how the choice reaches its ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["DemoOptions"]


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of every rank of the demo."""

    scenario: Literal["train", "replay", "shifted"] = "train"
    """`replay` trains on routes of a rollout in bfloat16 after a warm-up; `shifted` gives them to the wrong tokens."""
    warm_up_steps: int = 50
    """Steps before the first replay: routing has to be learned before it can be wrong."""
    steps: int = 150
    """Optimizer steps."""
    every_n_steps: int = 5
    """Steps between two reductions."""
    evaluate_every_n_steps: int = 25
    """Steps between two batches in evaluation mode."""
    port: int = 9464
    """Port of the Prometheus endpoint."""
    logdir: str = "runs/moe-demo"
    """Folder for TensorBoard."""
    exporters: tuple[str, ...] = ("console", "prometheus", "tensorboard")
    """Where the snapshots go."""
    serve: bool = False
    """Keep the endpoint up after training, until the stop file appears."""
    stop_file: str = ""
    """The demo ends early, and `serve` ends, when this file exists."""
    summary_file: str = ""
    """Where rank 0 writes the last snapshot."""

    def to_json(self) -> str:
        """Return the options as one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoOptions:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "exporters": tuple(values["exporters"])})

"""A rank of the demo that also counts by itself, from the outputs of the model's own routers.

torchrun ... recount_worker.py OPTIONS FOLDER: options as `DemoOptions.to_json` writes them, a folder for
one file a rank: a list of {stage, layer, tokens, padding, assignments}.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_telemetry.demo.worker import main


class Recount:
    def __init__(self) -> None:
        self._mask_T = torch.zeros(0)
        self._counts: dict[tuple[str, int], Any] = {}

    def attach(self, model: Any) -> None:
        model.register_forward_pre_hook(self._note_mask, with_kwargs=True)
        for index, layer in enumerate(model.model.layers):
            router = getattr(layer.mlp, "gate", None)  # the first layer is dense
            if router is not None:
                router.register_forward_hook(partial(self._count, index))

    def _note_mask(self, _model: nn.Module, _args: object, kwargs: dict[str, Tensor]) -> None:
        self._mask_T = kwargs["attention_mask"].flatten().bool()

    def _count(self, layer: int, router: nn.Module, _args: object, output: tuple[Tensor, ...]) -> None:
        experts_TK = output[2][self._mask_T]
        stage = "train" if router.training else "eval"
        counts = self._counts.setdefault((stage, layer), {"tokens": 0, "padding": 0, "assignments": torch.zeros(16)})
        counts["tokens"] += len(experts_TK)
        counts["padding"] += len(self._mask_T) - len(experts_TK)
        counts["assignments"] += torch.bincount(experts_TK.flatten(), minlength=16)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"stage": stage, "layer": layer, **counts, "assignments": counts["assignments"].int().tolist()}
            for (stage, layer), counts in self._counts.items()
        ]


if __name__ == "__main__":
    recount = Recount()
    main(sys.argv[1], recount.attach)
    Path(sys.argv[2], f"recount{os.environ['RANK']}.json").write_text(json.dumps(recount.rows()))

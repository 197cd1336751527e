"""TelemetryCallback in a real Lightning Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

import moe_telemetry as mt
from moe_telemetry.integrations.lightning import TelemetryCallback
from moe_telemetry.testing import RecordingExporter, TinyMoe

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
# its loggers tell of missing GPUs and of loaders with few workers
ROUTERS = {"model.layers.*.gate": mt.RouterSpec(num_experts=4, top_k=2)}


class Module(pl.LightningModule):
    def __init__(self, *, fails_at: int | None = None) -> None:
        super().__init__()
        self.model = TinyMoe(num_layers=2, num_experts=4, top_k=2, hidden_size=8)
        self._fails_at = fails_at

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if batch_index == self._fails_at:
            raise RuntimeError("out of luck")
        return self.model(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_index: int) -> None:  # noqa: ARG002  # Lightning's signature
        self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _batches(count: int) -> Any:
    return torch.utils.data.DataLoader(torch.randn(count, 5, 8), batch_size=1)


def _fit(folder: Path, callback: TelemetryCallback, module: Module, **settings: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=1,
        **settings,
    )
    trainer.fit(module, _batches(6), _batches(3))


def test_a_fit_counts_every_microbatch_and_validates_apart(tmp_path: Path) -> None:
    exporter = RecordingExporter()
    callback = TelemetryCallback(exporter, every_n_steps=1, routers=ROUTERS)
    module = Module()
    _fit(tmp_path, callback, module, accumulate_grad_batches=2, num_sanity_val_steps=0)
    assert callback.monitor is None
    assert [snapshot.step for snapshot in exporter.snapshots] == [1, 2, 3, 3]
    assert callback.last_snapshot == exporter.snapshots[2]
    counts = exporter.snapshots[-1].layers[mt.RouterKey("decoder", 0)].total
    assert (counts["train"].tokens, counts["eval"].tokens) == (6 * 5, 3 * 5)
    assert not any(each._forward_hooks for each in module.model.modules())


def test_a_fit_that_fails_lets_go_of_the_model_and_exports_what_there_is(tmp_path: Path) -> None:
    exporter = RecordingExporter()
    callback = TelemetryCallback(exporter, every_n_steps=1, routers=ROUTERS)
    module = Module(fails_at=2)
    with pytest.raises(RuntimeError, match="out of luck"):
        _fit(tmp_path, callback, module, num_sanity_val_steps=0)
    assert callback.monitor is None
    assert [snapshot.step for snapshot in exporter.snapshots] == [1, 2, 2]
    assert not any(each._forward_hooks for each in module.model.modules())


def test_a_callback_serves_one_fit_after_another(tmp_path: Path) -> None:
    exporter = RecordingExporter()
    callback = TelemetryCallback(exporter, every_n_steps=2, routers=ROUTERS)
    for _ in range(2):
        _fit(tmp_path, callback, Module(), num_sanity_val_steps=0)
    assert [snapshot.step for snapshot in exporter.snapshots] == [2, 4, 6, 6] * 2

"""TelemetryCallback in a real Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import moe_telemetry as mt
from moe_telemetry.integrations.transformers import TelemetryCallback
from moe_telemetry.testing import RecordingExporter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Twelve sequences of 16 tokens, the last four of them padding."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) * 7 + index) % 64
        mask = (torch.arange(16) < 12).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def test_a_trainer_counts_every_microbatch_and_evaluates_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )
    exporter = RecordingExporter()
    callback = TelemetryCallback(exporter, every_n_steps=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        eval_strategy="epoch",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Lines(), eval_dataset=Lines(), callbacks=[callback])
    trainer.train()
    assert callback.monitor is None
    steps = [snapshot.step for snapshot in exporter.snapshots]
    assert steps == [1, 2, 3, 3]
    last = exporter.snapshots[-1]
    assert last.health.run_finished
    counts = last.layers[mt.RouterKey("decoder", 0)].total
    assert (counts["train"].tokens, counts["train"].padding_tokens) == (12 * 12, 12 * 4)
    assert (counts["eval"].tokens, counts["eval"].padding_tokens) == (12 * 12, 12 * 4)
    assert not any(module._forward_hooks for module in model.modules() if "mlp" in type(module).__name__)

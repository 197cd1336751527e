"""The demo's model and its training step: nothing in here knows about telemetry."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_telemetry.demo.text import Batch

__all__ = ["Trainer", "build_model"]


def build_model(seed: int = 0) -> nn.Module:
    """Return a Qwen3-MoE of 1.5 million weights: 4 layers, the first dense, 16 experts, top-4, byte tokens."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        output_router_logits=True,  # adds the load-balancing loss
        router_aux_loss_coef=0.02,
        max_position_embeddings=512,
    )
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


class Trainer:
    """Data-parallel training of a causal language model, one batch a rank and step."""

    def __init__(self, model: nn.Module, learning_rate: float = 1e-3) -> None:
        self._model = model
        self._replica = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
        self._optimizer = torch.optim.AdamW(model.parameters(), learning_rate)

    def train(self, batch: Batch) -> float:
        """Take one optimizer step and return the loss in nats a byte."""
        self._model.train()
        loss = self._loss(self._replica, batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Return the loss on a batch in nats a byte, in evaluation mode."""
        self._model.eval()
        return float(self._loss(self._model, batch))

    @staticmethod
    def _loss(model: nn.Module, batch: Batch) -> Tensor:
        ids_BS, mask_BS = batch
        labels_BS = ids_BS.masked_fill(mask_BS == 0, -100)
        loss: Tensor = model(input_ids=ids_BS, attention_mask=mask_BS, labels=labels_BS).loss
        return loss

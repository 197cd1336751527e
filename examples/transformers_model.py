"""Watch a transformers model: its routers are found by themselves, padding by its attention_mask."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_telemetry as mt


def main() -> None:
    """Train on random tokens for four steps and print each router's hottest expert."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=8,
            num_experts_per_tok=2,
            mlp_only_layers=[0],
        )
    )
    optimizer = torch.optim.AdamW(model.parameters())
    ids_BS = torch.randint(256, (4, 32))
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[:, 24:] = 0
    with mt.watch(model, every_n_steps=2) as monitor:
        for step in range(1, 5):
            loss = model(input_ids=ids_BS, attention_mask=mask_BS, labels=ids_BS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if snapshot := monitor.step(step):
                for key, layer in snapshot.layers.items():
                    counts = layer.total["train"]
                    hottest = max(range(layer.num_experts), key=counts.assignments.__getitem__)
                    print(f"step {step}: router {key}: {counts.tokens} tokens, hottest expert {hottest}")


if __name__ == "__main__":
    main()

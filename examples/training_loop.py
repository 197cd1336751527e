"""Watch a model of one's own: point at its routers, call step() once an optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import moe_telemetry as mt


class Router(nn.Module):
    """Choose 2 of 8 experts for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the ids of the chosen experts, each `[T, 2]`."""
        return self.gate(hidden_TH).softmax(-1).topk(2)


class Layer(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Add what the chosen experts say, weighted."""
        weights_TK, ids_TK = self.router(hidden_TH)
        all_TEH = torch.stack([expert(hidden_TH) for expert in self.experts], 1)
        chosen_TKH = all_TEH.gather(1, ids_TK[..., None].expand(-1, -1, 16))
        return hidden_TH + (chosen_TKH * weights_TK[..., None]).sum(1)


def main() -> None:
    """Train for 20 steps and print how even the load was."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    optimizer = torch.optim.AdamW(model.parameters())
    routers = {"*.router": mt.RouterSpec(num_experts=8, top_k=2)}
    with mt.watch(model, routers=routers, every_n_steps=10) as monitor:
        for step in range(1, 21):
            hidden_TH = torch.randn(256, 16)
            loss = (model(hidden_TH) - hidden_TH.roll(1, -1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if snapshot := monitor.step(step):
                for name, labels, value in snapshot.samples():
                    if name == "moe_load_max_violation_ratio":
                        print(f"step {step}: router {labels['block']}.{labels['layer']}: MaxVio {value:.2f}")


if __name__ == "__main__":
    main()

"""A Mixture-of-Experts model small enough for tests, which remembers what its routers chose."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_telemetry.routers import RouterSpec

__all__ = ["TinyMoe", "TinyRouter"]


class TinyRouter(nn.Module):
    """A softmax top-k router: `[T, H]` to (logits `[T, E]`, weights `[T, K]`, expert ids `[T, K]`)."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(num_experts, hidden_size))

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose `top_k` experts for every token."""
        logits_TE = hidden_TH @ self.weight.t()
        weights_TK, ids_TK = logits_TE.softmax(-1).topk(self.top_k, dim=-1)
        return logits_TE, weights_TK, ids_TK


class TinyLayer(nn.Module):
    """One router and its experts, all of them computed for all tokens."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.gate = TinyRouter(hidden_size, num_experts, top_k)
        self.experts = nn.Parameter(torch.randn(num_experts, hidden_size, hidden_size) / hidden_size)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """Add the weighted experts to the residual stream."""
        hidden_TH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1])
        _, weights_TK, ids_TK = self.gate(hidden_TH)
        experts_TEH = torch.einsum("th,ehg->teg", hidden_TH, self.experts)
        index_TKH = ids_TK.unsqueeze(-1).expand(-1, -1, hidden_TH.shape[-1])
        mixed_TH = (experts_TEH.gather(1, index_TKH) * weights_TK.unsqueeze(-1)).sum(1)
        return torch.add(hidden_BSH, mixed_TH.view_as(hidden_BSH))


class TinyMoe(nn.Module):
    """Layers of routers and experts on `[B, S, H]` hidden states, checkpointed where asked.

    `TinyMoe.routers` is what `watch(model, routers=...)` needs to find its routers.
    """

    def __init__(
        self,
        *,
        num_layers: int = 2,
        hidden_size: int = 16,
        num_experts: int = 8,
        top_k: int = 2,
        use_reentrant: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(TinyLayer(hidden_size, num_experts, top_k) for _ in range(num_layers))
        self.num_experts = num_experts
        self.top_k = top_k
        self.use_reentrant = use_reentrant

    @property
    def routers(self) -> dict[str, RouterSpec]:
        """The `routers` argument of `watch` for this model."""
        return {"layers.*.gate": RouterSpec(num_experts=self.num_experts, top_k=self.top_k)}

    def forward(self, hidden_BSH: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002  # read by telemetry
        """Run all layers; `use_reentrant` None means without activation checkpointing."""
        for layer in self.layers:
            if self.use_reentrant is None:
                hidden_BSH = layer(hidden_BSH)
            else:
                hidden_BSH = checkpoint(layer, hidden_BSH, use_reentrant=self.use_reentrant)
        return hidden_BSH

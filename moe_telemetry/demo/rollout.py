"""The demo's rollout engine: the same model in bfloat16, whose routes come as an engine sends them."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_telemetry.demo.text import Batch
from moe_telemetry.identity import RouterKey
from moe_telemetry.replay import Routes

__all__ = ["Rollout"]


class Rollout:
    """Runs batches as an inference engine would, and returns the routes of their tokens.

    As with vLLM, the payload of a sequence has a row for every token but the last, which is never
    forwarded, and a column for every layer, dense ones included.
    """

    def __init__(self, model: nn.Module, keys: Sequence[RouterKey], *, is_shifted: bool) -> None:
        copied: Any = copy.deepcopy(model)
        self._model = copied.to(torch.bfloat16).eval()
        self._keys = keys
        self._is_shifted = is_shifted
        self._ids: dict[int, Tensor] = {}
        for key in keys:
            self._model.model.layers[key.layer].mlp.gate.register_forward_hook(self._remember(key.layer))

    def _remember(self, layer: int) -> Any:  # noqa: ANN401  # a hook
        def hook(_module: nn.Module, _args: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self._ids[layer] = output[2]

        return hook

    @torch.no_grad()
    def routes(self, trained: nn.Module, batch: Batch) -> Routes:
        """Return the routes of a batch under the weights of the model that is trained."""
        self._model.load_state_dict(trained.state_dict())
        ids_BS, mask_BS = batch
        self._model(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False)
        lengths = mask_BS.sum(1).tolist()
        return Routes.concat([self._sequence(row, length, ids_BS.shape[1]) for row, length in enumerate(lengths)])

    def _sequence(self, row: int, length: int, padded_length: int) -> Routes:
        num_layers = len(self._model.model.layers)
        top_k = self._ids[self._keys[0].layer].shape[-1]
        payload = np.zeros((length - 1, num_layers, top_k), dtype=np.uint8)
        for layer, ids_TK in self._ids.items():
            payload[:, layer] = ids_TK.view(-1, padded_length, top_k)[row, : length - 1].numpy()
        if self._is_shifted:
            # the fault: every token gets the experts of the token before it
            payload = np.roll(payload, 1, axis=0)
        return Routes.from_vllm(
            _as_npy(payload),
            num_tokens=length,
            keys=self._keys,
            num_layers=num_layers,
            num_experts=self._model.config.num_experts,
        )


def _as_npy(payload: np.ndarray[Any, Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, payload)
    return base64.b64encode(buffer.getvalue()).decode()

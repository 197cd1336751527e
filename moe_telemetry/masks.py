"""Which tokens are real: the mask that the running forward was given, or that the user states."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_telemetry.errors import MaskError

__all__ = ["MaskTap", "TokenMask", "fit_mask", "mask_position"]

_logger = logging.getLogger("moe_telemetry")


class TokenMask:
    """The validity mask in force, shared by all hooks of a monitor.

    Models call models (a language model within a vision-language model), so the masks of running
    forwards form a stack; a mask that the user states wins over all of them.
    """

    def __init__(self) -> None:
        self.stated: Tensor | None = None
        self.batch_size = 1
        """B of the last forward, where its input tells it."""
        self._running: list[Tensor | None] = []
        self._has_reported = False

    @property
    def current(self) -> Tensor | None:
        """The mask to count by, None where every token is real."""
        if self.stated is not None:
            return self.stated
        return self._running[-1] if self._running else None

    @property
    def running_batch_size(self) -> int:
        """B of the forward that runs; 1 where its hook did not run, as in a model that is compiled as a whole."""
        return self.batch_size if self._running else 1

    @contextmanager
    def state(self, mask: Tensor) -> Iterator[None]:
        """Count by `mask` within, whatever masks the model's forwards are given.

        Raises:
            MaskError: the mask is no tensor `[B, S]` or `[T]`.
        """
        if not isinstance(mask, Tensor) or mask.ndim not in (1, 2):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise MaskError(f"valid_tokens: mask is {shape}; expected a tensor of shape [B, S] or [T]")
        before, self.stated = self.stated, mask
        try:
            yield
        finally:
            self.stated = before

    def enter(self, attention_mask: object) -> None:
        """Note the `attention_mask` argument of a forward that starts."""
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            self._running.append(attention_mask)
        elif attention_mask is None or not self._running:
            self._running.append(None)
            self._report(attention_mask)
        else:
            # a mask already expanded for attention: the caller's own [B, S] mask still holds
            self._running.append(self._running[-1])

    def _report(self, attention_mask: object) -> None:
        if attention_mask is None or self._has_reported or torch.compiler.is_compiling():
            return
        self._has_reported = True
        _logger.warning(
            "moe_telemetry: the model is given an attention mask that is already expanded, which does not tell "
            "padding: all tokens are counted as real. State the real ones by monitor.valid_tokens(mask)"
        )

    def leave(self) -> None:
        """Forget the mask of a forward that ends."""
        if self._running:
            self._running.pop()


class MaskTap:
    """Where one model's forward takes its `attention_mask`, and the stack that it goes to."""

    def __init__(self, mask: TokenMask, position: int) -> None:
        self.mask = mask
        self._position = position

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the mask of a call with these arguments, and its batch size."""
        tokens = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if isinstance(tokens, Tensor) and tokens.ndim > 1 and not torch.compiler.is_compiling():
            self.mask.batch_size = tokens.shape[0]
        if self._position < len(args):
            self.mask.enter(args[self._position])
        else:
            self.mask.enter(kwargs.get("attention_mask"))

    def __deepcopy__(self, memo: object) -> None:
        """Leave a copy of the model without a tap."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave a pickled model without a tap."""
        return type(None), ()


def mask_position(module: nn.Module) -> int | None:
    """Return the position of `attention_mask` among the arguments of a forward, None where it has none."""
    try:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):
        return None
    return names.index("attention_mask") if "attention_mask" in names else None


def fit_mask(valid: Tensor, num_tokens: int, *, strict: bool) -> Tensor | None:
    """Return a mask `[B, S]` or `[T]` as bool `[T]` for a router call of T = `num_tokens` tokens.

    A mask that is for other tokens raises where the user stated it (`strict`), and is reported and not
    used where it was found in a model's arguments.

    Raises:
        MaskError: `strict`, and the mask has another number of elements.
    """
    if valid.numel() == num_tokens:
        return valid.reshape(-1) > 0
    if not strict and valid.ndim == 2 and num_tokens < valid.numel() and num_tokens % valid.shape[0] == 0:
        # with a key-value cache the mask covers the past too, and the router sees the newest tokens
        return valid[:, valid.shape[1] - num_tokens // valid.shape[0] :].reshape(-1) > 0
    message = f"mask of shape {tuple(valid.shape)} does not fit a router call of {num_tokens} tokens"
    if strict:
        raise MaskError(f"{message}; expected [B, S] or [T] with {num_tokens} elements")
    _logger.warning("moe_telemetry: attention %s; all of its tokens are counted as real", message)
    return None

"""Taps: what hangs on a hooked router, and the few hook functions that all of them share.

The hooks are shared module-level functions and find their tap in the module's `__dict__`: a function
made per layer would make torch.compile compile every layer anew, and a registered buffer would be
cast, saved and broadcast with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_telemetry.counters import UNCOUNTED_SLOT, count_choices, new_cells, slot_value
from moe_telemetry.errors import ConfigError, LifecycleError
from moe_telemetry.masks import MaskTap, TokenMask, mask_position
from moe_telemetry.routers import RouterOutput, RouterSite

__all__ = ["StageSlots", "Tap", "hook_masks", "hook_router", "unhook"]

_TAP = "_moe_telemetry_tap"
_MASK = "_moe_telemetry_mask"


class StageSlots:
    """Which slot of the cells counts now: one device scalar for training mode, one for evaluation."""

    def __init__(self) -> None:
        self.names = ["train", "eval"]
        self._slots: tuple[int, int] = (0, 1)
        self._scalars: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the (train, eval) scalars on `device`; they keep their address for ever."""
        if device not in self._scalars:
            with torch.inference_mode(mode=False):
                self._scalars[device] = tuple(
                    torch.full((), slot_value(slot), dtype=torch.int64, device=device) for slot in self._slots
                )  # type: ignore[assignment]
        return self._scalars[device]

    def slot_of(self, name: str) -> int:
        """Return the slot of a stage, taking a free one for a new name.

        Raises:
            ConfigError: all slots are taken.
        """
        if name not in self.names:
            if len(self.names) == UNCOUNTED_SLOT:
                raise ConfigError(f"stage {name!r} is one too many; a monitor keeps {UNCOUNTED_SLOT}: {self.names}")
            self.names.append(name)
        return self.names.index(name)

    @contextmanager
    def all_to(self, slot: int) -> Iterator[None]:
        """Count everything within under one slot."""
        before = self._slots
        self._set((slot, slot))
        try:
            yield
        finally:
            self._set(before)

    def _set(self, slots: tuple[int, int]) -> None:
        self._slots = slots
        for scalars in self._scalars.values():
            for scalar, slot in zip(scalars, slots, strict=True):
                scalar.fill_(slot_value(slot))


class Tap:
    """One router's counters, with all that its hook needs to add a call to them."""

    def __init__(self, site: RouterSite, mask: TokenMask, stages: StageSlots, device: torch.device) -> None:
        self.site = site
        self.read = site.read
        self.mask = mask
        self._stages = stages
        self.cells = new_cells(site.num_experts, device)
        self.train_slot, self.eval_slot = stages.on(device)

    def add(self, output: RouterOutput, valid: Tensor | None, *, training: bool, strict: bool) -> None:
        """Count one router call."""
        choices = output.expert_ids if output.expert_ids is not None else _as_map(output.routing_map)
        if hasattr(choices, "to_local"):
            choices = choices.to_local()
        if choices.device != self.cells.device:
            self._move(choices.device)
        slot = self.train_slot if training else self.eval_slot
        count_choices(self.cells, slot, choices, valid, top_k=self._top_k(choices), strict=strict)

    def _top_k(self, choices: Tensor) -> int:
        """Return K, or 0 where the ids tell it."""
        if self.site.top_k is None and choices.dtype == torch.bool:
            raise ConfigError(
                f"router {self.site.name!r} gives a routing map, which does not tell K: pass "
                f"routers={{{self.site.name!r}: RouterSpec(num_experts={self.site.num_experts}, top_k=...)}}"
            )
        return self.site.top_k or 0

    def _move(self, device: torch.device) -> None:
        """Follow a model that was moved after it was watched."""
        if self.cells.device.type == "meta":
            self.cells = new_cells(self.site.num_experts, device)
        else:
            self.cells = self.cells.to(device)
        self.train_slot, self.eval_slot = self._stages.on(device)

    def __deepcopy__(self, memo: object) -> None:
        """Leave a copy of the model (a reference model, an average of weights) without a tap."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave a pickled model without a tap."""
        return type(None), ()


def _as_map(routing_map: Tensor | None) -> Tensor:
    if routing_map is None:
        raise ConfigError("RouterOutput has neither expert_ids nor routing_map; one of them is needed")
    return routing_map if routing_map.dtype == torch.bool else routing_map != 0


def hook_router(module: nn.Module, tap: Tap) -> None:
    """Attach `tap` to its router's module.

    Raises:
        LifecycleError: the module is watched already.
    """
    if module.__dict__.get(_TAP) is not None:
        raise LifecycleError(f"router {tap.site.name!r} is watched already: close() its monitor first")
    _unregister(module)
    object.__setattr__(module, _TAP, tap)
    if tap.site.hook == "input":
        module.register_forward_pre_hook(_before_call, with_kwargs=True)
    else:
        module.register_forward_hook(_after_call, with_kwargs=True)


def hook_masks(model: nn.Module, router_names: Sequence[str], mask: TokenMask) -> list[nn.Module]:
    """Watch the `attention_mask` of every model around the routers; return the modules hooked."""
    hooked = []
    for name, module in model.named_modules():
        # numbered modules are layers: they get the mask that their model made of its argument
        is_layer = any(part.isdigit() for part in name.split("."))
        is_around = any(router.startswith(f"{name}." if name else "") for router in router_names)
        if is_layer or not is_around or (position := mask_position(module)) is None:
            continue
        _unregister(module)
        object.__setattr__(module, _MASK, MaskTap(mask, position))
        module.register_forward_pre_hook(_enter_model, with_kwargs=True)
        module.register_forward_hook(_leave_model, always_call=True)
        hooked.append(module)
    return hooked


def unhook(module: nn.Module) -> None:
    """Remove every hook and attribute of ours from a module."""
    _unregister(module)
    module.__dict__.pop(_TAP, None)
    module.__dict__.pop(_MASK, None)


def _unregister(module: nn.Module) -> None:
    """Remove our hooks, also those that a deep copy of a watched module has inherited."""
    for registry in (module._forward_hooks, module._forward_pre_hooks):  # noqa: SLF001
        for number in [number for number, hook in registry.items() if hook in _HOOKS]:
            del registry[number]
            for flags in _flag_registries(module):
                flags.pop(number, None)


def _flag_registries(module: nn.Module) -> tuple[dict[int, bool], ...]:
    return (
        module._forward_hooks_with_kwargs,  # noqa: SLF001
        module._forward_hooks_always_called,  # noqa: SLF001
        module._forward_pre_hooks_with_kwargs,  # noqa: SLF001
    )


def _after_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
    tap: Tap | None = module.__dict__.get(_TAP)
    if tap is not None:
        valid = tap.mask.current
        strict = tap.mask.stated is not None
        tap.add(tap.read(args, kwargs, output), valid, training=module.training, strict=strict)


def _before_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _after_call(module, args, kwargs, None)


def _enter_model(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    tap: MaskTap | None = module.__dict__.get(_MASK)
    if tap is not None:
        tap.enter(args, kwargs)


def _leave_model(module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
    tap: MaskTap | None = module.__dict__.get(_MASK)
    if tap is not None:
        tap.mask.leave()


_HOOKS = frozenset({_after_call, _before_call, _enter_model, _leave_model})

"""The hooks on a model: a few functions that all routers share, found and removed without a trace.

They find their tap in the module's `__dict__`: a function made per layer would make torch.compile
compile every layer anew, and a registered buffer would be cast, saved and broadcast with the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from moe_telemetry.errors import LifecycleError
from moe_telemetry.masks import MaskTap, TokenMask, mask_position
from moe_telemetry.taps import Tap

__all__ = ["hook_masks", "hook_router", "unhook"]

_TAP = "_moe_telemetry_tap"
_MASK = "_moe_telemetry_mask"


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
        hidden = tap.input_of(args, kwargs)
        tap.add(tap.read(args, kwargs, output), valid, hidden, training=module.training, strict=strict)


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

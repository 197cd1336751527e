"""Attach taps to a model's routers, keep them attached, and leave the model as it was."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from moe_telemetry.discovery import Routers, find_sites
from moe_telemetry.errors import LifecycleError
from moe_telemetry.hooks import hook_masks, hook_router, unhook
from moe_telemetry.identity import RouterKey
from moe_telemetry.masks import TokenMask
from moe_telemetry.routers import RouterSite
from moe_telemetry.score_counters import Sampling
from moe_telemetry.stages import StageSlots
from moe_telemetry.taps import Tap

__all__ = ["Attachment"]

_logger = logging.getLogger("moe_telemetry")


class Attachment:
    """The taps of one monitor on the routers of its models."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        routers: Routers | None = None,
        *,
        scores: bool = False,
        per_sequence: bool = False,
    ) -> None:
        self.mask = TokenMask()
        self.sampling = Sampling()
        self.stages = StageSlots()
        self._models = models
        self._routers = routers
        self._hooked: list[nn.Module] = []
        self._has_looked_for_silence = False
        sites = find_sites(models, routers)
        self.taps = {
            site.key: Tap(
                site,
                self.mask,
                self.stages,
                _device_of(site, models),
                sampling=self.sampling if scores else None,
                per_sequence=per_sequence,
            )
            for site in sites
        }
        self._attach()

    def _attach(self) -> None:
        try:
            for tap in self.taps.values():
                self._hook(tap)
        except LifecycleError:
            self.detach()
            raise
        names = [tap.site.name for tap in self.taps.values()]
        for model in self._models:
            self._hooked += hook_masks(model, names, self.mask)
        self._forget_compiled_code()

    def _hook(self, tap: Tap) -> None:
        if tap.site.module is not None:
            hook_router(tap.site.module, tap)
            self._hooked.append(tap.site.module)

    def _forget_compiled_code(self) -> None:
        """Have compiled models compile again: code compiled before the hooks came would skip them."""
        if any(_is_compiled(module) for model in self._models for module in model.modules()):
            torch._dynamo.reset()  # noqa: SLF001  # the documented way to drop compiled code

    def follow_rebuilt_modules(self) -> None:
        """Move the taps of routers whose module was replaced since the last look to the new module."""
        alive = {id(module) for model in self._models for module in model.modules()}
        lost = {
            key for key, tap in self.taps.items() if tap.site.module is not None and id(tap.site.module) not in alive
        }
        if not lost:
            return
        for site in find_sites(self._models, self._routers):
            if site.key in lost:
                self._move(self.taps[site.key], site)
                lost.discard(site.key)
        if lost:
            _logger.warning("moe_telemetry: routers %s are no longer in the model", _names(lost))

    def _move(self, tap: Tap, site: RouterSite) -> None:
        if tap.site.module is not None:
            unhook(tap.site.module)
        tap.follow(site)
        self._hook(tap)

    def report_silent_routers(self) -> None:
        """Report, when the first step is over, routers whose hook has not fired; later calls do nothing."""
        if self._has_looked_for_silence:
            return
        self._has_looked_for_silence = True
        hooked = [tap for tap in self.taps.values() if tap.site.module is not None]
        silent = [tap.site.name for tap in hooked if tap.cells.device.type != "meta" and not tap.cells.any()]
        if silent:
            _logger.warning(
                "moe_telemetry: %d of %d routers were observed in the first step; silent: %s. Call watch() before "
                "torch.compile, and check that the model's forward calls these modules",
                len(hooked) - len(silent),
                len(hooked),
                ", ".join(silent),
            )

    def detach(self) -> None:
        """Remove every hook and attribute from the models."""
        for module in self._hooked:
            unhook(module)
        self._hooked.clear()


def _names(keys: set[RouterKey]) -> str:
    return ", ".join(str(key) for key in sorted(keys, key=lambda key: key.order))


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _device_of(site: RouterSite, models: Sequence[nn.Module]) -> torch.device:
    """Return where the router's parameters are, else where the model's first parameter is."""
    for module in (*([site.module] if site.module else []), *models):
        for parameter in module.parameters():
            return parameter.device
    return torch.device("cpu")

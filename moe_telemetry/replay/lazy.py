"""The parts of this package that need more than torch, imported when they are first used; and shared bounds."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from moe_telemetry.errors import RoutesError

__all__ = ["MAX_IDS", "engines", "storage"]

MAX_IDS = 2**28
"""Most expert ids that one payload, file or layout may hold: 1 GiB as int32."""


def engines() -> ModuleType:
    """Return the module that reads payloads.

    Raises:
        RoutesError: numpy is not installed.
    """
    return _import("engines", "payloads of rollout engines")


def storage() -> ModuleType:
    """Return the module that reads and writes files.

    Raises:
        RoutesError: safetensors is not installed.
    """
    return _import("storage", "route files")


def _import(name: str, what: str) -> ModuleType:
    try:
        return import_module(f"moe_telemetry.replay.{name}")
    except ModuleNotFoundError as error:
        raise RoutesError(f"{what} need {error.name}: pip install {error.name}") from error

"""Starting a W&B run from a thread that nobody watches: it never asks anybody for a login."""

from __future__ import annotations

import inspect
import os
from typing import Any

import wandb

from moe_telemetry.errors import ExporterError

__all__ = ["start_run"]


def start_run(
    name: str | None,
    *,
    project: str | None,
    entity: str | None,
    mode: Any,  # noqa: ANN401  # one of the words that wandb.init() takes
    folder: str | os.PathLike[str] | None,
    timeout_seconds: float,
) -> Any:  # noqa: ANN401  # a wandb.Run
    """Return a new run; what is None is left to W&B and its variables.

    Raises:
        ExporterError: nobody is logged in.
        wandb.errors.Error: the server cannot be reached, or refuses.
    """
    if (mode or wandb.setup().settings.mode) in {"online", "shared"} and not _is_logged_in():
        raise ExporterError("not logged in to W&B: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
    # what training prints is not ours to send, and hundreds of last values not ours to print
    settings = wandb.Settings(console="off", quiet=True, init_timeout=timeout_seconds)
    return wandb.init(
        project=project,
        entity=entity,
        name=name,
        mode=mode,
        dir=folder,
        settings=settings,
    )


def _is_logged_in() -> bool:
    """Tell whether there is a login, without a prompt on the terminal that training runs in."""
    if "prompt" not in inspect.signature(wandb.login).parameters:
        return True  # before 0.31 W&B has no way to look without asking
    return wandb.login(prompt=False, verify=False)

"""Run a function on several ranks of a real gloo group, each a process on this machine."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["run_ranks"]


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:  # noqa: ANN401  # any function
    """Call `function(rank, *args)` on `num_ranks` ranks and return what each returned, by rank.

    The function is a module-level function of an importable module, its result can be pickled, and the
    default process group is ready when it is called. What a rank raises is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (function, num_ranks, folder, args), nprocs=num_ranks)
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(num_ranks)]  # noqa: S301  # our own


def _run_rank(rank: int, function: Callable[..., Any], num_ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    try:
        result = function(rank, *args)
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()

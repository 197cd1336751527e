"""Operators that a tracer sees as one opaque node, and that decide when they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["define_operator", "is_recompute"]

_library = torch.library.Library("moe_telemetry", "DEF")


def define_operator(schema: str, run: Callable[..., None]) -> Callable[..., None]:
    """Define `moe_telemetry::<name>` that calls `run` and returns nothing; return what to call.

    The call goes through the operator where something traces or watches: a compiled graph then has one
    node for it, and selective checkpointing does not see its in-place update, of which it would
    complain. Elsewhere `run` is called at once, which saves the dispatcher's time.

    Args:
        schema: in the language of `torch.library`, as in `"count(Tensor(a!) cells, Tensor ids) -> ()"`.
        run: takes the schema's arguments by position.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_telemetry::{name}", _return_nothing)
    operator = getattr(torch.ops.moe_telemetry, name)

    def call(*arguments: Any) -> None:  # noqa: ANN401  # those of the schema
        is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001
        (operator if is_traced else run)(*arguments)

    return call


def is_recompute() -> bool:
    """Tell whether autograd runs backward on this thread: a forward within it is a recomputation.

    Checkpointing runs its second forward inside the backward pass, reentrant or not, nested or not.
    It must be asked at run time; under torch.compile the answer would be frozen into the graph.
    """
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001


def _return_nothing(*_arguments: object) -> None:
    """Say to a tracer what every operator here returns."""

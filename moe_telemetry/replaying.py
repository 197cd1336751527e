"""Replay in the running model: routes take the place of the routers' own choice, or are only compared.

A router chooses with one top-k over E scores. While routes are in force, that top-k is intercepted: the
router's own choice and the scores it was made from are seen without a second top-k, and the replayed
experts go back in its place with their live scores, so that the router itself forms their weights and
gradients reach it. What follows the top-k in the router's forward is untouched.

Letters: T tokens, L router layers, K experts chosen per token (top-k), E experts, B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_telemetry.errors import LifecycleError, RoutesError
from moe_telemetry.identity import RouterKey
from moe_telemetry.masks import fit_mask
from moe_telemetry.operators import is_recompute
from moe_telemetry.replay import Routes, RowComparison, compare_rows
from moe_telemetry.replay_counters import count_comparison
from moe_telemetry.routers import RouterOutput
from moe_telemetry.seating import Rows, seat_routes
from moe_telemetry.taps import Tap

__all__ = ["ReplaySample", "ReplayState", "Replaying"]

_TOPK = (torch.topk, Tensor.topk)
_SAMPLE_ROWS = 4096


class ReplaySample:
    """Rows of one forward, for `locate_misalignment`: what was replayed, and what the routers chose."""

    def __init__(self) -> None:
        self.replayed: dict[RouterKey, Tensor] = {}
        self.own: dict[RouterKey, Tensor] = {}
        self.rows: Rows | None = None
        self.valid: Tensor | None = None

    def add(self, key: RouterKey, rows: Rows, own_TK: Tensor, valid_T: Tensor | None) -> None:
        """Keep the first rows of one router."""
        if self.rows is not None and self.rows.num_rows != rows.num_rows:
            return
        self.rows, self.valid = rows, valid_T
        self.replayed[key] = rows.ids_of(key)[:_SAMPLE_ROWS].clone()
        self.own[key] = own_TK[:_SAMPLE_ROWS].clone()


class Replaying:
    """Routes in force for the forwards of one `with` block."""

    def __init__(self, routes: Routes, *, compares_only: bool) -> None:
        self.routes = routes
        self.compares_only = compares_only
        self._rows: dict[tuple[int, torch.device], Rows] = {}
        self.mask: Tensor | None = None
        self.valid_T: Tensor | None = None

    def rows(self, num_rows: int, mask: Tensor | None, device: torch.device) -> Rows:
        """Return the routes in the order of a router call of `num_rows` rows.

        Raises:
            RoutesError: the routes are for another number of tokens.
        """
        if mask is not self.mask:
            # another forward in the same block: its tokens are at other rows
            self._rows.clear()
            self.mask = mask
        if (num_rows, device) not in self._rows:
            self._rows[num_rows, device] = seat_routes(self.routes, num_rows, mask, device)
        return self._rows[num_rows, device]


class ReplayState:
    """What is replayed now, in the forward and, under activation checkpointing, in the backward.

    A checkpoint runs a router again in the backward pass, when its `with` block is long over. The
    outputs of the model carry a gradient hook that tells whose backward begins.
    """

    def __init__(self) -> None:
        self.active: Replaying | None = None
        self.in_backward: Replaying | None = None
        self.wants_sample = True
        self.sample: ReplaySample | None = None
        self._installed: list[tuple[nn.Module, Any]] = []
        self._handles: list[Any] = []

    @contextmanager
    def use(self, replaying: Replaying) -> Iterator[None]:
        """Put routes in force.

        Raises:
            LifecycleError: other routes are in force.
        """
        if self.active is not None:
            raise LifecycleError("routes are in force already: replay() and check() cannot be nested")
        self.active = replaying
        try:
            yield
        finally:
            self.active = None

    def now(self) -> Replaying | None:
        """Return the routes in force for the router call that runs."""
        if torch.compiler.is_compiling():
            return self.active
        return self.in_backward if is_recompute() else self.active

    def install(self, models: list[nn.Module], taps: Mapping[RouterKey, Tap]) -> None:
        """Put the interception into every router's forward, once; without routes in force it passes through."""
        if self._installed:
            return
        for tap in taps.values():
            if (module := tap.site.module) is not None:
                self._installed.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = partial(_forward, tap, self, module.forward)
        self._handles = [model.register_forward_hook(partial(_mark_backward, self)) for model in models]

    def remove(self) -> None:
        """Take the interception out again."""
        for module, earlier in self._installed:
            del module.__dict__["forward"]
            if earlier is not None:
                module.__dict__["forward"] = earlier
        for handle in self._handles:
            handle.remove()
        self._installed, self._handles = [], []

    def __deepcopy__(self, memo: object) -> None:
        """Leave a copy of the model without routes."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave a pickled model without routes."""
        return type(None), ()


def _mark_backward(state: ReplayState | None, _module: nn.Module, _args: object, output: object) -> None:
    """Have the backward of this forward announce itself before it reaches a checkpoint."""
    if state is None or torch.compiler.is_compiling() or is_recompute():
        return
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(partial(_begin_backward, state, state.active))


def _begin_backward(state: ReplayState, replaying: Replaying | None, _gradient: Tensor) -> None:
    state.in_backward = replaying


class _Interception(TorchFunctionMode):
    """Sees the top-k of one router call, and puts the replayed experts in place of its result."""

    def __init__(self, num_experts: int, top_k: int, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._top_k = top_k
        self._choose = choose
        self.is_done = False

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_done or func not in _TOPK or result.indices.shape[-1] != self._top_k:
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._num_experts:
            return result
        self.is_done = True
        ids = self._choose(scores, result.indices)
        if ids is result.indices:
            return result
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def _forward(tap: Tap | None, state: ReplayState | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # any router
    replaying = state.now() if state is not None else None
    if tap is None or state is None or replaying is None or not tap.site.chooses_by_score:
        return forward(*args, **kwargs)
    if tap.site.hook == "input":
        _compare_output(tap, state, replaying, tap.read(args, kwargs, None))
        return forward(*args, **kwargs)
    top_k = replaying.routes.ids.shape[-1]
    interception = _Interception(tap.site.num_experts, top_k, partial(_choose, tap, state, replaying))
    with interception:
        output = forward(*args, **kwargs)
    if not interception.is_done:
        _compare_output(tap, state, replaying, tap.read(args, kwargs, output))
    return output


def _choose(tap: Tap, state: ReplayState, replaying: Replaying, scores: Tensor, own: Tensor) -> Tensor:
    """Count how the routes agree with the router's own choice, and return the experts to use."""
    own_TK = own.reshape(-1, own.shape[-1])
    comparison, replayed_TK = _compare(tap, state, replaying, own_TK, scores.reshape(-1, scores.shape[-1]))
    if replaying.compares_only:
        return own
    chosen_TK = torch.where(comparison.usable_T.unsqueeze(1), replayed_TK.to(own.dtype), own_TK)
    return chosen_TK.view_as(own)


def _compare_output(tap: Tap, state: ReplayState, replaying: Replaying, output: RouterOutput) -> None:
    """Compare by what the router's hook reads, where its top-k cannot be seen.

    Raises:
        RoutesError: routes were to be replayed: they cannot reach this router.
    """
    if not replaying.compares_only:
        raise RoutesError(
            f"router {tap.site.name!r} ({type(tap.site.module).__name__}) makes its choice by no top-k that can be "
            "replaced from outside; use check() in place of replay()"
        )
    if output.expert_ids is not None:
        _compare(tap, state, replaying, output.expert_ids.reshape(-1, output.expert_ids.shape[-1]), None)


def _compare(
    tap: Tap, state: ReplayState, replaying: Replaying, own_TK: Tensor, scores_TE: Tensor | None
) -> tuple[RowComparison, Tensor]:
    recomputes = not torch.compiler.is_compiling() and is_recompute()
    mask = tap.mask.current
    rows = replaying.rows(len(own_TK), replaying.mask if recomputes else mask, own_TK.device)
    if not recomputes:
        strict = tap.mask.stated is not None
        replaying.valid_T = None if mask is None else fit_mask(mask, len(own_TK), strict=strict)
    replayed_TK = rows.ids_of(tap.site.key)
    comparison = compare_rows(
        replayed_TK,
        own_TK,
        num_experts=tap.site.num_experts,
        valid=replaying.valid_T,
        sequence_starts=rows.starts_T,
        scores=None if scores_TE is None else scores_TE.detach(),
    )
    if not recomputes:
        slot = tap.train_slot if tap.site.module is None or tap.site.module.training else tap.eval_slot
        count_comparison(tap.replay, tap.peaks, slot, comparison.counts().vector)
        if state.wants_sample and state.sample is not None:
            state.sample.add(tap.site.key, rows, own_TK, replaying.valid_T)
    return comparison, replayed_TK


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (value for value in output.values() if isinstance(value, Tensor))
    elif isinstance(output, (tuple, list)):
        yield from (value for value in output if isinstance(value, Tensor))

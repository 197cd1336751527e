"""Replay in the running model: routes take the place of the routers' own choice, or are only compared.

A router chooses with one top-k over E scores. While routes are in force, that top-k is intercepted: the
router's own choice and the scores it was made from are seen without a second top-k, and the replayed
experts go back in its place with their live scores, so that the router itself forms their weights and
gradients reach it. What follows the top-k in the router's forward is untouched.

Letters: T tokens, L router layers, K experts chosen per token (top-k), E experts, B sequences, S positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

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


class _Choice(NamedTuple):
    """One router call under routes."""

    ids: Tensor
    """Integer `[..., K]`: the experts to use."""
    own_TK: Tensor
    rows: Rows
    comparison: RowComparison
    valid_T: Tensor | None


class Replaying:
    """Routes in force for the forwards of one `with` block."""

    def __init__(self, routes: Routes, *, compares_only: bool) -> None:
        self.routes = routes
        self.compares_only = compares_only
        self._rows: dict[tuple[int, torch.device], Rows] = {}
        self.mask: Tensor | None = None
        self._seated_mask: Tensor | None = None
        self.valid_T: Tensor | None = None

    def rows(self, num_rows: int, device: torch.device) -> Rows:
        """Return the routes in the order of a router call of `num_rows` rows, under the present mask.

        Raises:
            RoutesError: the routes are for another number of tokens.
        """
        if self.mask is not self._seated_mask:
            # another forward in the same block: its tokens are at other rows
            self._rows.clear()
            self._seated_mask = self.mask
        if (num_rows, device) not in self._rows:
            self._rows[num_rows, device] = seat_routes(self.routes, num_rows, self.mask, device)
        return self._rows[num_rows, device]


class ReplayState:
    """What is replayed now, in the forward and, under activation checkpointing, in the backward.

    A checkpoint runs a layer again in the backward pass, when its `with` block is long over, and maybe
    after other microbatches. It hands the layer the input that it kept, so the address of that input, in
    the call of the layer or of the first module in it, tells whose forward is run again. Where nothing
    was kept, the outputs of the model tell whose backward has begun.
    """

    def __init__(self) -> None:
        self.active: Replaying | None = None
        self.in_backward: Replaying | None = None
        self.wants_sample = True
        self.sample: ReplaySample | None = None
        self._of_input: dict[int, tuple[weakref.ref[Tensor], Replaying | None]] = {}
        self._around: set[nn.Module] = set()
        self._hooked: set[nn.Module] = set()
        self._installed: dict[nn.Module, Any] = {}
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

    def install(self, models: Sequence[nn.Module], taps: Mapping[RouterKey, Tap]) -> None:
        """Put the interception into every router's forward; without routes in force it passes through.

        Modules that have it are left alone, so that routers rebuilt since the last time get it too.
        """
        routers = {tap.site.module: tap for tap in taps.values() if tap.site.module is not None}
        new = [module for module in routers if module not in self._installed]
        for module in new:
            self._installed[module] = module.__dict__.get("forward")
            module.__dict__["forward"] = partial(_forward, routers[module], self, module.forward)
        for model in models if new else ():
            self._handles.append(model.register_forward_hook(partial(_mark_backward, self)))
            around = {module for module in model.modules() if any(part in routers for part in module.modules())}
            self._around |= around - routers.keys()
            inside = {part for module in around for part in module.modules()} - self._hooked
            self._hooked |= inside
            hook = partial(_note_input, self)
            self._handles += [part.register_forward_pre_hook(hook, with_kwargs=True) for part in inside]

    def forget(self) -> None:
        """Let go of the routes of microbatches whose backward is over."""
        self._of_input.clear()
        self.in_backward = None

    def note_input(self, module: nn.Module, tensor: Tensor) -> None:
        """Remember whose forward the input of a layer belongs to; in a recomputation, look it up."""
        address = tensor.data_ptr()
        if is_recompute():
            kept, replaying = self._of_input.get(address, (None, None))
            # an input that nobody kept is gone, and its address may be anybody's
            if kept is not None and kept() is not None:
                self.in_backward = replaying
        elif module in self._around:
            # an entry goes with its tensor, so that there are as many as checkpoints keep
            reference = weakref.ref(tensor, partial(_drop, self._of_input, address))
            self._of_input[address] = reference, self.active

    def remove(self) -> None:
        """Take the interception out again."""
        for module, earlier in self._installed.items():
            del module.__dict__["forward"]
            if earlier is not None:
                module.__dict__["forward"] = earlier
        for handle in self._handles:
            handle.remove()
        self._installed, self._handles, self._around, self._hooked = {}, [], set(), set()
        self.forget()

    def __deepcopy__(self, memo: object) -> None:
        """Leave a copy of the model without routes."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave a pickled model without routes."""
        return type(None), ()


def _drop(of_input: dict[int, tuple[weakref.ref[Tensor], Any]], address: int, dead: weakref.ref[Tensor]) -> None:
    if address in of_input and of_input[address][0] is dead:
        del of_input[address]


def _note_input(state: ReplayState | None, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if state is None or torch.compiler.is_compiling():
        return
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if first is not None and type(first) is Tensor and first.device.type != "meta":
        state.note_input(module, first)


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
    """Sees the top-k of one router call, and puts the replayed experts in place of its result.

    A router with a single group of experts makes a top-k of E scores for the group as well; the last one
    of that form is the choice.
    """

    def __init__(self, num_experts: int, top_k: int, choose: Callable[[Tensor, Tensor], _Choice]) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._top_k = top_k
        self._choose = choose
        self.choice: _Choice | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _TOPK or result.indices.shape[-1] != self._top_k:
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._num_experts:
            return result
        self.choice = self._choose(scores, result.indices)
        if self.choice.ids is result.indices:
            return result
        return torch.return_types.topk((scores.gather(-1, self.choice.ids), self.choice.ids))


def _forward(
    tap: Tap | None,
    state: ReplayState | None,
    forward: Callable[..., Any],
    *args: Any,  # noqa: ANN401  # those of any router
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    replaying = state.now() if state is not None else None
    if tap is None or state is None or replaying is None or not tap.site.chooses_by_score:
        return forward(*args, **kwargs)
    if tap.site.hook == "input":
        _count(tap, state, _compare_read(tap, replaying, tap.read(args, kwargs, None)))
        return forward(*args, **kwargs)
    top_k = replaying.routes.ids.shape[-1]
    interception = _Interception(tap.site.num_experts, top_k, partial(_choose, tap, replaying))
    with interception:
        output = forward(*args, **kwargs)
    choice = interception.choice or _compare_read(tap, replaying, tap.read(args, kwargs, output))
    _count(tap, state, choice)
    return output


def _choose(tap: Tap, replaying: Replaying, scores: Tensor, own: Tensor) -> _Choice:
    """Compare the routes with the router's own choice, and say which experts to use."""
    own_TK = own.reshape(-1, own.shape[-1])
    comparison, rows = _compare(tap, replaying, own_TK, scores.reshape(-1, scores.shape[-1]))
    if replaying.compares_only:
        return _Choice(own, own_TK, rows, comparison, replaying.valid_T)
    replayed_TK = rows.ids_of(tap.site.key).to(own.dtype)
    chosen_TK = torch.where(comparison.usable_T.unsqueeze(1), replayed_TK, own_TK)
    return _Choice(chosen_TK.view_as(own), own_TK, rows, comparison, replaying.valid_T)


def _compare_read(tap: Tap, replaying: Replaying, output: RouterOutput) -> _Choice | None:
    """Compare by what the router's hook reads, where its top-k cannot be seen.

    Raises:
        RoutesError: routes were to be replayed: they cannot reach this router.
    """
    if not replaying.compares_only:
        raise RoutesError(
            f"router {tap.site.name!r} ({type(tap.site.module).__name__}) makes its choice by no top-k that can be "
            "replaced from outside; use check() in place of replay()"
        )
    if output.expert_ids is None:
        return None
    own_TK = output.expert_ids.reshape(-1, output.expert_ids.shape[-1])
    comparison, rows = _compare(tap, replaying, own_TK, None)
    return _Choice(output.expert_ids, own_TK, rows, comparison, replaying.valid_T)


def _compare(tap: Tap, replaying: Replaying, own_TK: Tensor, scores_TE: Tensor | None) -> tuple[RowComparison, Rows]:
    if torch.compiler.is_compiling() or not is_recompute():
        replaying.mask, strict = tap.mask.current, tap.mask.stated is not None
        replaying.valid_T = None if replaying.mask is None else fit_mask(replaying.mask, len(own_TK), strict=strict)
    rows = replaying.rows(len(own_TK), own_TK.device)
    comparison = compare_rows(
        rows.ids_of(tap.site.key),
        own_TK,
        num_experts=tap.site.num_experts,
        valid=replaying.valid_T,
        sequence_starts=rows.starts_T,
        scores=None if scores_TE is None else scores_TE.detach(),
    )
    return comparison, rows


def _count(tap: Tap, state: ReplayState, choice: _Choice | None) -> None:
    """Add one comparison to the counters, and keep its rows where a sample is wanted; not in a recomputation."""
    if choice is None or (not torch.compiler.is_compiling() and is_recompute()):
        return
    slot = tap.train_slot if tap.site.module is None or tap.site.module.training else tap.eval_slot
    count_comparison(tap.replay, tap.peaks, slot, choice.comparison.counts().vector)
    if state.wants_sample and state.sample is not None:
        state.sample.add(tap.site.key, choice.rows, choice.own_TK, choice.valid_T)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (value for value in output.values() if isinstance(value, Tensor))
    elif isinstance(output, (tuple, list)):
        yield from (value for value in output if isinstance(value, Tensor))

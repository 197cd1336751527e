"""Capture of router calls for a trace: what a tap hands over, copied away from the device without waiting for it.

The calls of a step wait here until `monitor.step(n)` gives the step its number. In compiled code an opaque
operator is what calls; everything that may change between calls is looked up when it runs.

Letters: T tokens, N rows that are kept of them, K experts chosen per token (top-k), E experts, B sequences.
"""

from __future__ import annotations

import itertools
import logging
import weakref

import torch
from torch import Tensor

from moe_telemetry.masks import TokenMask, fit_mask
from moe_telemetry.operators import define_operator, is_recompute
from moe_telemetry.routers import RouterSite
from moe_telemetry.sequence_diagnostics import diagnose_call
from moe_telemetry.stages import StageSlots
from moe_telemetry.trace.calls import Budget, TracedCall, leave_device

__all__ = ["RouterCapture", "StepCapture", "capture_call", "narrow_ids"]

_logger = logging.getLogger("moe_telemetry")
_handles = itertools.count()
_routers: weakref.WeakValueDictionary[int, RouterCapture] = weakref.WeakValueDictionary()


class StepCapture:
    """What the routers of a monitor called in the step that runs now; all of it on the training thread."""

    def __init__(
        self,
        stages: StageSlots,
        mask: TokenMask,
        budget: Budget,
        *,
        tensors: tuple[str, ...] = (),
        max_tokens: int | None = None,
    ) -> None:
        self.stages = stages
        self.mask = mask
        self.budget = budget
        self.wanted = tensors
        self.max_tokens = max_tokens
        self.is_on = True
        """Whether the step that runs now is captured."""
        self.number = 0
        """Grows with every step, so that routers know when theirs is over."""
        self.has_calls = False
        """Whether a router has called in it, if it is captured."""
        self.calls: list[TracedCall] = []
        self.calls_behind = self.calls_failed = self.calls_in_graphs = self.calls_of_other_steps = 0
        self.tokens_over_limit = 0

    def take_calls(self) -> list[TracedCall]:
        """End the step, and return what was captured in it."""
        calls, self.calls, self.has_calls = self.calls, [], False
        self.number += 1
        return calls


class RouterCapture:
    """Where one tap hands over its calls."""

    def __init__(self, site: RouterSite, step: StepCapture) -> None:
        self.site = site
        self.step = step
        # plain values, the same for all routers, so that compiled code is shared by layers
        self.takes_scores = bool({"scores", "diagnostics"} & {*step.wanted})
        self.takes_hidden_states = "hidden_states" in step.wanted
        self.has_called = False
        self.lacking: set[str] = set()
        """Which of the wanted tensors this router could not give."""
        self._step_number = -1
        self._num_calls = self._num_rows = 0
        self._has_weight = False
        number = next(_handles)
        with torch.inference_mode(mode=False):
            # a tensor on the host, for a traced graph to hand over: a number would make one graph a router
            self.handle = torch.tensor(number)
        _routers[number] = self

    def add(
        self,
        choices: Tensor,
        valid: Tensor | None,
        scores: Tensor | None,
        hidden: Tensor | None,
        *,
        training: bool,
        strict: bool,
    ) -> None:
        """Take one router call; what goes wrong is counted, and never reaches training."""
        self.has_called = True
        stage = self.step.stages.name(training=training)
        if stage is None or is_recompute():
            return
        if not self.step.is_on:
            self.step.calls_of_other_steps += 1
            return
        self.step.has_calls = True
        if choices.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # a copy made now would be made again by every replay, and be seen by nobody
            self.step.calls_in_graphs += 1
        else:
            try:
                self._take(stage, choices.detach(), valid, scores, hidden, strict=strict)
            except Exception as error:  # noqa: BLE001  # a device out of memory, a reader that fails
                self.step.calls_failed += 1
                if self.step.calls_failed == 1:
                    _logger.warning("moe_telemetry: a call of router %r was not traced: %s", self.site.name, error)

    def _take(
        self,
        stage: str,
        choices: Tensor,
        valid: Tensor | None,
        scores: Tensor | None,
        hidden: Tensor | None,
        *,
        strict: bool,
    ) -> None:
        self._follow_step()
        rows = choices.reshape(-1, choices.shape[-1])
        num_tokens = len(rows)
        valid_T = None if valid is None else fit_mask(valid, num_tokens, strict=strict)
        batch_size = _batch_size(choices, valid, self.step.mask)
        microbatch, num_kept = self._number_call(num_tokens)
        tensors = self._choice(rows[:num_kept], valid_T)
        tensors |= self._extras(rows, valid_T, scores, hidden, num_kept, batch_size)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if not self.step.budget.take(num_bytes):
            self._drop()
            return
        try:
            copies, arrival = leave_device(tensors)
        except RuntimeError:
            self.step.budget.give_back(num_bytes)
            raise
        self._has_weight = True
        call = TracedCall(
            key=self.site.key,
            stage=stage,
            microbatch=microbatch,
            num_tokens=num_tokens,
            num_experts=self.site.num_experts,
            num_sequences=batch_size,
            is_sorted=rows.dtype == torch.bool,
            ids_NK=copies.pop("ids"),
            valid_N=copies.pop("valid", None),
            excess=copies.pop("excess", None),
            tensors=copies,
            arrival=arrival,
        )
        self.step.calls.append(call)

    def _choice(self, rows: Tensor, valid_T: Tensor | None) -> dict[str, Tensor]:
        """Return the ids of rows that are kept, their validity, and how many choices of a map are beyond K."""
        tensors = {"ids": narrow_ids(rows, self.site.num_experts, self.site.top_k)}
        if valid_T is not None:
            tensors["valid"] = valid_T[: len(rows)]
        if rows.dtype == torch.bool:
            tensors["excess"] = (rows.sum(-1) - tensors["ids"].shape[1]).clamp(min=0).sum()
        return tensors

    def _drop(self) -> None:
        self.step.calls_behind += 1
        if self.step.calls_behind == 1:
            _logger.warning(
                "moe_telemetry: the trace drops router calls: the memory that they may wait in is full. Call "
                "monitor.step() after each batch, set max_tokens_per_step, or trace to a faster disk"
            )

    def _follow_step(self) -> None:
        if self._step_number != self.step.number:
            self._step_number = self.step.number
            self._num_calls = self._num_rows = 0
            self._has_weight = False

    def _number_call(self, num_tokens: int) -> tuple[int, int]:
        """Return the number of this call within the step, and how many of its rows are kept."""
        microbatch, num_kept = self._num_calls, num_tokens
        if self.step.max_tokens is not None:
            num_kept = min(num_tokens, self.step.max_tokens - self._num_rows)
        self._num_calls += 1
        self._num_rows += num_kept
        self.step.tokens_over_limit += num_tokens - num_kept
        return microbatch, num_kept

    def _extras(
        self,
        rows: Tensor,
        valid_T: Tensor | None,
        scores: Tensor | None,
        hidden: Tensor | None,
        num_kept: int,
        batch_size: int,
    ) -> dict[str, Tensor]:
        """Return the tensors beside the routes that the options ask for and this router can give."""
        found: dict[str, Tensor | None] = {}
        for name in self.step.wanted:
            if name == "scores":
                found[name] = _rows_of(scores, len(rows), num_kept, self.site.num_experts)
            elif name == "hidden_states":
                found[name] = _rows_of(hidden, len(rows), num_kept)
            elif name == "router_weights" and not self._has_weight:
                found[name] = self.site.weight()
            elif name == "diagnostics" and len(rows):
                found[name] = diagnose_call(self.site, scores, rows, valid_T, self.site.expert_bias(), batch_size)
        self.lacking |= {name for name, tensor in found.items() if tensor is None}
        if "router_weights" in found:
            found["expert_bias"] = self.site.expert_bias()
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def __deepcopy__(self, memo: object) -> None:
        """Leave a copy of the model without a capture."""


def capture_call(
    router: RouterCapture,
    choices: Tensor,
    valid: Tensor | None,
    scores: Tensor | None,
    hidden: Tensor | None,
    *,
    training: bool,
    strict: bool,
) -> None:
    """Hand one router call to its capture.

    Args:
        router: the capture.
        choices: integer expert ids `[..., K]`, or a bool routing map `[..., E]`.
        valid: True for real tokens, `[B, S]` or `[T]`; None where all are real.
        scores: float `[..., E]`; None where the call does not show them, or they are not wanted.
        hidden: float `[..., H]`, the router's input; None likewise.
        training: whether the call counts as `train` or as `eval`, outside of `stage()`.
        strict: whether a mask that does not fit was stated by the user.
    """
    scores = _local(scores) if router.takes_scores else None
    _call(router.handle, choices, valid, scores, _local(hidden), training, strict)


def _local(tensor: Tensor | None) -> Tensor | None:
    """Return this rank's part of a distributed tensor."""
    return tensor.to_local() if tensor is not None and hasattr(tensor, "to_local") else tensor


def narrow_ids(rows: Tensor, num_experts: int, top_k: int | None) -> Tensor:
    """Return the chosen experts `[N, K]` in few bytes: `num_experts` or more stands for a choice not made.

    A map gives ascending ids. Everything is computed on the device, and nothing waits for it.
    """
    dtype = torch.uint8 if num_experts < 2**8 - 1 else torch.int16 if num_experts < 2**15 else torch.int32
    if rows.dtype == torch.bool:
        expert_E = torch.arange(num_experts, dtype=torch.int32, device=rows.device)
        chosen_NE = torch.where(rows, expert_E, num_experts)
        return chosen_NE.topk(top_k or 1, largest=False, sorted=True).values.to(dtype)
    # int64 first: other types may not hold the bounds, or know no clamp
    wide_NK = rows if rows.dtype == torch.int64 else rows.to(torch.int64)
    # in uint8, -1 becomes 255, which is no expert either
    return wide_NK.clamp(-1, num_experts).to(dtype)


def _batch_size(choices: Tensor, valid: Tensor | None, mask: TokenMask) -> int:
    num_tokens = choices.numel() // choices.shape[-1]
    if valid is not None and valid.ndim == 2:
        batch_size = valid.shape[0]
    else:
        batch_size = choices.shape[0] if choices.ndim == 3 else mask.running_batch_size
    return batch_size if batch_size and num_tokens % batch_size == 0 else 1


def _rows_of(tensor: Tensor | None, num_tokens: int, num_kept: int, columns: int | None = None) -> Tensor | None:
    """Return the first rows of a float tensor, None where it has another number of rows or columns."""
    if tensor is None or tensor.ndim < 2 or tensor.numel() != num_tokens * (columns or tensor.shape[-1]):
        return None
    return tensor.detach().reshape(num_tokens, tensor.shape[-1])[:num_kept]


def _capture(
    handle: Tensor,
    choices: Tensor,
    valid: Tensor | None,
    scores: Tensor | None,
    hidden: Tensor | None,
    training: bool,  # noqa: FBT001  # an operator's arguments are positional
    strict: bool,  # noqa: FBT001
) -> None:
    router = _routers.get(int(handle))
    if router is not None:
        router.add(choices, valid, scores, hidden, training=training, strict=strict)


_call = define_operator(
    "capture(Tensor(a!) handle, Tensor choices, Tensor? valid, Tensor? scores, Tensor? hidden, bool training, "
    "bool strict) -> ()",
    _capture,
)

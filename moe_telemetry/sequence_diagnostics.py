"""The per-sequence diagnostics of each router's last call, kept on the device: one tensor a router.

Letters: T tokens, S positions, B sequences, K experts chosen per token (top-k), E experts.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from moe_telemetry.diagnostics import RouterDiagnosticChannel, as_probabilities, build_router_diagnostics
from moe_telemetry.masks import fit_mask
from moe_telemetry.operators import define_operator, is_recompute
from moe_telemetry.routers import RouterSite

__all__ = ["LastDiagnostics", "diagnose_call", "keep_diagnostics"]

_OF_SCORES = (
    RouterDiagnosticChannel.MEAN_SCORE,
    RouterDiagnosticChannel.AUX_LOAD,
    RouterDiagnosticChannel.AUX_ACTUAL_OVERLAP,
    RouterDiagnosticChannel.TOPK_BOUNDARY_RELATIVE_MARGIN,
)

_logger = logging.getLogger("moe_telemetry")
_handles = itertools.count()
_kept: weakref.WeakValueDictionary[int, LastDiagnostics] = weakref.WeakValueDictionary()


class LastDiagnostics:
    """What `build_router_diagnostics` says of one router's last call."""

    def __init__(self, site: RouterSite, is_paused: Callable[[], bool]) -> None:
        self.site = site
        self.is_paused = is_paused
        self.tensor: Tensor | None = None
        """float32 `[B, 7, E]`, on the router's device; None before the first call."""
        self.has_scores = True
        self._has_warned = False
        number = next(_handles)
        with torch.inference_mode(mode=False):
            # a tensor on the host, for a traced graph to hand over: a number would make one graph a router
            self.handle = torch.tensor(number)
        _kept[number] = self

    def take(self) -> Tensor | None:
        """Return the tensor; warn, once, of the channels that this router cannot have."""
        if self.tensor is not None and not self.has_scores and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "moe_telemetry: router %r does not show its scores: channels %s of its diagnostics are NaN",
                self.site.name,
                ", ".join(channel.name for channel in _OF_SCORES),
            )
        return self.tensor


def keep_diagnostics(
    last: LastDiagnostics,
    scores: Tensor | None,
    choices: Tensor,
    valid: Tensor | None,
    *,
    batch_size: int,
    strict: bool,
) -> None:
    """Summarise one router call by sequence in place of the call before it.

    Args:
        last: where to keep it.
        scores: float `[..., E]`; None makes the channels that need scores NaN.
        choices: integer expert ids `[..., K]`, or a bool routing map `[..., E]`; rows are batch-first.
        valid: True for real tokens, `[B, S]` or `[T]`; None where all are real.
        batch_size: B where neither the mask nor the choices tell it; 1 where T is no multiple of it.
        strict: whether a mask that does not fit raises `MaskError`, or is reported and not used.
    """
    if valid is not None and valid.ndim == 2:
        batch_size = valid.shape[0]
    elif choices.ndim == 3:
        batch_size = choices.shape[0]
    _call(last.handle, scores, choices, valid, last.site.expert_bias(), batch_size, strict)


def _diagnose(
    handle: Tensor,
    scores: Tensor | None,
    choices: Tensor,
    valid: Tensor | None,
    bias: Tensor | None,
    batch_size: int,
    strict: bool,  # noqa: FBT001  # an operator's arguments are positional
) -> None:
    last = _kept.get(int(handle))
    rows = choices.reshape(-1, choices.shape[-1])
    if last is None or len(rows) == 0 or last.is_paused() or is_recompute():
        return
    batch_size = batch_size if len(rows) % batch_size == 0 else 1
    valid_T = None if valid is None else fit_mask(valid, len(rows), strict=strict)
    last.has_scores = scores is not None and scores.numel() == len(rows) * last.site.num_experts
    last.tensor = diagnose_call(last.site, scores, rows, valid_T, bias, batch_size)


@torch.no_grad()
def diagnose_call(
    site: RouterSite, scores: Tensor | None, rows: Tensor, valid_T: Tensor | None, bias: Tensor | None, batch_size: int
) -> Tensor:
    """Return `build_router_diagnostics` of one router call, float32 `[B, 7, E]`.

    Args:
        site: the router, which knows what its scores are.
        scores: float `[..., E]`; channels that need them are NaN where they are None or of another size.
        rows: integer expert ids `[T, K]`, or a bool routing map `[T, E]`; T is a multiple of B, not 0.
        valid_T: True for real tokens.
        bias: the expert bias `[E]`.
        batch_size: B.
    """
    actual_TE = aux_TE = _as_map(rows, site.num_experts)
    has_scores = scores is not None and scores.numel() == actual_TE.numel()
    if scores is None or not has_scores:
        scores_TE = torch.zeros(actual_TE.shape, device=rows.device)
    else:
        scores_TE = as_probabilities(
            scores.reshape(-1, site.num_experts), kind=site.score_kind, function=site.score_function
        )
        if site.is_biased:
            aux_TE = _as_map(scores_TE.topk(site.top_k or rows.shape[1]).indices, site.num_experts)
    padding_T = None if valid_T is None else _by_position(~valid_T, batch_size)
    tensor = build_router_diagnostics(
        _by_position(scores_TE, batch_size),
        _by_position(aux_TE, batch_size),
        _by_position(actual_TE, batch_size),
        bias,
        len(rows) // batch_size,
        batch_size,
        padding_T,
    )
    if not has_scores:
        tensor[:, _OF_SCORES] = torch.nan
    return tensor


def _as_map(choices: Tensor, num_experts: int) -> Tensor:
    """Return bool `[T, E]`; an id outside 0..E-1 is in no column."""
    if choices.dtype == torch.bool:
        return choices
    ids_TK = choices.to(torch.int64).clamp(-1, num_experts) + 1
    map_TE = torch.zeros(len(ids_TK), num_experts + 2, dtype=torch.bool, device=choices.device)
    return map_TE.scatter_(1, ids_TK, value=True)[:, 1:-1]


def _by_position(rows: Tensor, batch_size: int) -> Tensor:
    """Return rows in the order of positions, all sequences side by side, from rows in that of sequences."""
    return rows.reshape(batch_size, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)


_call = define_operator(
    "diagnose(Tensor(a!) handle, Tensor? scores, Tensor choices, Tensor? valid, Tensor? bias, int batch_size, "
    "bool strict) -> ()",
    _diagnose,
)

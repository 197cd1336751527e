"""Tap: the device counters of one router, and how a router call is added to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_telemetry.counters import NUM_SLOTS, count_choices, new_cells
from moe_telemetry.errors import ConfigError
from moe_telemetry.masks import TokenMask, fit_mask
from moe_telemetry.operators import is_recompute
from moe_telemetry.recording import Recording
from moe_telemetry.replay_totals import REPLAY_SUMS
from moe_telemetry.route_capture import RouterCapture, capture_call
from moe_telemetry.routers import RouterOutput, RouterSite
from moe_telemetry.score_counters import NUM_SCORE_ROWS, Sampling, count_scores
from moe_telemetry.score_statistics import MAX_FIELDS, NOTHING
from moe_telemetry.sequence_diagnostics import LastDiagnostics, keep_diagnostics
from moe_telemetry.stages import StageSlots

__all__ = ["PEAKS", "Tap"]

PEAKS = ("longest_equal_run", *(field.name for field in MAX_FIELDS))
"""What a router keeps the largest of, until the next reduction."""


class Tap:
    """One router's counters, with all that its hook needs to add a call to them."""

    def __init__(
        self,
        site: RouterSite,
        mask: TokenMask,
        stages: StageSlots,
        device: torch.device,
        *,
        sampling: Sampling | None = None,
        per_sequence: bool = False,
    ) -> None:
        self.site = site
        self.read = site.read
        self.mask = mask
        self.recording: Recording | None = None
        self.capture: RouterCapture | None = None
        self.last: LastDiagnostics | None = LastDiagnostics(site, lambda: stages.is_paused) if per_sequence else None
        self._fed_top_k: int | None = None
        self._sampling = sampling
        self._stages = stages
        self._make_counters(device)

    def feed(self, expert_ids: Any, scores: Any, valid: Any, *, training: bool) -> None:  # noqa: ANN401  # arrays too
        """Count one router call by hand.

        Raises:
            ConfigError: the ids are no rows of integers, or have another K than the calls before them, by
                which tokens are told from choices.
            MaskError: `valid` is of another size.
        """
        ids = torch.as_tensor(expert_ids)
        is_integer = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if not is_integer or ids.ndim < 2 or ids.shape[-1] == 0:
            shape = tuple(ids.shape)
            raise ConfigError(f"observe: expert_ids is {ids.dtype} of shape {shape}; expected integers [T, K]")
        expected, top_k = self.site.top_k or self._fed_top_k, ids.shape[-1]
        if expected not in {None, top_k}:
            raise ConfigError(f"observe: router {self.site.key} has {expected} choices a token, these ids {top_k}")
        self._fed_top_k = top_k
        device = self.cells.device
        valid_there = None if valid is None else torch.as_tensor(valid, device=device)
        scores_there = None if scores is None else torch.as_tensor(scores, device=device)
        output = RouterOutput(expert_ids=ids.to(device), scores=scores_there)
        self.add(output, valid_there, training=training, strict=True)

    def follow(self, site: RouterSite) -> None:
        """Go on counting for a module that has taken the place of the router's."""
        self.site = site
        self.read = site.read
        if self.last is not None:
            self.last.site = site
        if self.capture is not None:
            self.capture.site = site

    def _make_counters(self, device: torch.device) -> None:
        self.cells = new_cells(self.site.num_experts, device)
        with torch.inference_mode(mode=False):
            self.replay = torch.zeros(len(REPLAY_SUMS), NUM_SLOTS, dtype=torch.int64, device=device)
            self.peaks = torch.full((len(PEAKS), NUM_SLOTS), NOTHING, dtype=torch.int64, device=device)
            self.scores = torch.zeros(self._num_score_rows, NUM_SLOTS, dtype=torch.int64, device=device)
        self.train_slot, self.eval_slot = self._stages.on(device)

    @property
    def _num_score_rows(self) -> int:
        return 0 if self._sampling is None else NUM_SCORE_ROWS + self.site.num_experts

    def input_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the hidden states that a module's call is given, where a trace wants them."""
        if self.capture is None or not self.capture.takes_hidden_states:
            return None
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                return value
        return None

    def add(
        self,
        output: RouterOutput,
        valid: Tensor | None,
        hidden: Tensor | None = None,
        *,
        training: bool,
        strict: bool,
    ) -> None:
        """Count one router call."""
        choices = output.expert_ids if output.expert_ids is not None else _as_map(output.routing_map)
        if hasattr(choices, "to_local"):
            choices = choices.to_local()
        if choices.device != self.cells.device:
            self._move(choices.device)
        slot = self.train_slot if training else self.eval_slot
        count_choices(self.cells, slot, choices, valid, top_k=self._top_k(choices), strict=strict)
        if self._sampling is not None or self.last is not None:
            self._add_scores(output.scores, choices, valid, slot, strict=strict)
        if self.recording is not None:
            self._record(self.recording, choices, valid, strict=strict)
        if self.capture is not None:
            capture_call(self.capture, choices, valid, output.scores, hidden, training=training, strict=strict)

    def _add_scores(
        self, scores: Tensor | None, choices: Tensor, valid: Tensor | None, slot: Tensor, *, strict: bool
    ) -> None:
        if scores is not None and hasattr(scores, "to_local"):
            scores = scores.to_local()
        counters, sampling = (self.scores, self.peaks, slot), self._sampling
        if sampling is not None:
            count_scores(*counters, scores, choices, valid, sampling=sampling, site=self.site, strict=strict)
        if self.last is not None:
            keep_diagnostics(self.last, scores, choices, valid, batch_size=self.mask.batch_size, strict=strict)

    def _record(self, recording: Recording, expert_ids: Tensor, valid: Tensor | None, *, strict: bool) -> None:
        if torch.compiler.is_compiling() or is_recompute():
            return
        if expert_ids.dtype == torch.bool:
            # the chosen experts of a map, in the order of their numbers; a choice that was dropped is -1
            chosen_TE = expert_ids.reshape(-1, expert_ids.shape[-1]).to(torch.uint8)
            is_chosen_TK, index_TK = chosen_TE.topk(self.site.top_k or 1)
            expert_ids = index_TK.masked_fill(is_chosen_TK == 0, -1)
        num_tokens = expert_ids.numel() // expert_ids.shape[-1]
        valid_T = None if valid is None else fit_mask(valid, num_tokens, strict=strict)
        recording.add(self.site.key, expert_ids, valid_T, self.mask.batch_size)

    def _top_k(self, choices: Tensor) -> int:
        """Return K, or 0 where the ids tell it."""
        if self.site.top_k is None and choices.dtype == torch.bool:
            raise ConfigError(
                f"router {self.site.name!r} gives a routing map, which does not tell K: pass "
                f"routers={{{self.site.name!r}: RouterSpec(num_experts={self.site.num_experts}, top_k=...)}}"
            )
        return self.site.top_k or 0

    def _move(self, device: torch.device) -> None:
        """Follow a model that was moved after it was watched."""
        before = self.cells, self.replay, self.peaks, self.scores
        self._make_counters(device)
        if before[0].device.type != "meta":
            for counters, earlier in zip((self.cells, self.replay, self.peaks, self.scores), before, strict=True):
                counters.copy_(earlier)

    def __deepcopy__(self, memo: object) -> None:
        """Leave a copy of the model (a reference model, an average of weights) without a tap."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave a pickled model without a tap."""
        return type(None), ()


def _as_map(routing_map: Tensor | None) -> Tensor:
    if routing_map is None:
        raise ConfigError("RouterOutput has neither expert_ids nor routing_map; one of them is needed")
    return routing_map if routing_map.dtype == torch.bool else routing_map != 0

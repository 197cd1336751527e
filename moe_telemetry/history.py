"""From one reduction to the next: totals become windows, and both become a snapshot's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import add
from typing import Any

from moe_telemetry.identity import RouterKey
from moe_telemetry.load_shape import relative_load_histogram
from moe_telemetry.packing import SHARE_FIELDS, VIEW_FIELDS, Reduced, Tally
from moe_telemetry.records import Counts, LayerSnapshot, Share
from moe_telemetry.replay_totals import REPLAY_SUMS, ReplayTotals
from moe_telemetry.score_statistics import (
    MICROBATCH_FIELDS,
    ScoreStatistics,
    microbatch_max_violation,
    wrapped_difference,
)

__all__ = ["History"]

_NUM_BASE_FIELDS = len(SHARE_FIELDS) - len(REPLAY_SUMS)
_LONGEST_RUN = VIEW_FIELDS.index("longest_equal_run")
_FIRST_SCORE_PEAK = VIEW_FIELDS.index("logit_max")


class History:
    """Remembers the totals of the last reduction, to tell what came after it."""

    def __init__(self, routers: Mapping[RouterKey, int]) -> None:
        self._routers = routers
        self._last: Reduced | None = None
        self.layers: Mapping[RouterKey, LayerSnapshot] = {
            key: LayerSnapshot(num_experts=num_experts, total={}, window={}, share={})
            for key, num_experts in routers.items()
        }

    def advance(self, reduced: Reduced) -> None:
        """Take the totals of a new reduction: `layers` then holds them and the window before it."""
        self.layers = {key: self._layer(key, reduced) for key in self._routers}
        self._last = reduced

    def end_window(self) -> None:
        """Begin a window in which nothing was counted yet; totals stay."""
        self.layers = {
            key: replace(layer, window={}, worst_rank_zero_overlap=None) for key, layer in self.layers.items()
        }

    def _layer(self, key: RouterKey, reduced: Reduced) -> LayerSnapshot:
        tallies = {stage: tally for stage, tally in reduced.tallies[key].items() if _saw_tokens(tally)}
        earlier = self._last.tallies[key] if self._last is not None else {}
        windows = {
            stage: _difference(tally, earlier[stage]) if stage in earlier else tally for stage, tally in tallies.items()
        }
        seen = {stage: tally for stage, tally in windows.items() if _saw_tokens(tally)}
        views = reduced.views[key]
        peaks = {stage: [max(peak) for peak in zip(*(view[stage] for view in views), strict=True)] for stage in seen}
        return LayerSnapshot(
            num_experts=self._routers[key],
            total={stage: _counts(tally, ()) for stage, tally in tallies.items()},
            window={stage: _counts(tally, peaks[stage]) for stage, tally in seen.items()},
            share={stage: _share(reduced.shares[key][stage], tally) for stage, tally in tallies.items()},
            worst_rank_zero_overlap=self._worst_rank(key, reduced),
            relative_load=_added(self.layers[key].relative_load, seen),
        )

    def _worst_rank(self, key: RouterKey, reduced: Reduced) -> float | None:
        now = [_checked_and_zero(view) for view in reduced.views[key]]
        before = [_checked_and_zero(view) for view in self._last.views[key]] if self._last else [(0, 0)] * len(now)
        ratios = [
            (zero - zero_before) / (checked - checked_before)
            for (checked, zero), (checked_before, zero_before) in zip(now, before, strict=True)
            if checked > checked_before
        ]
        return max(ratios, default=None)


def _checked_and_zero(view: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return the checked rows of a rank, and those without a common expert, of all stages."""
    return sum(numbers[0] for numbers in view.values()), sum(numbers[1] for numbers in view.values())


def _added(before: Mapping[str, tuple[int, ...]], windows: Mapping[str, Tally]) -> dict[str, tuple[int, ...]]:
    """Return the histograms of relative load with one window more."""
    after = dict(before)
    for stage, tally in windows.items():
        if (buckets := relative_load_histogram(tally.experts)) is not None:
            after[stage] = tuple(map(add, after.get(stage, [0] * len(buckets)), buckets))
    return after


def _saw_tokens(tally: Tally) -> bool:
    return any(tally.fields[:2])


def _difference(now: Tally, before: Tally) -> Tally:
    return Tally(
        experts=tuple(wrapped_difference(now.experts, before.experts)),
        scores=tuple(wrapped_difference(now.scores, before.scores)),
        fields=tuple(wrapped_difference(now.fields, before.fields)),
    )


def _counts(tally: Tally, peaks: Sequence[int]) -> Counts:
    tokens, padding_tokens, _, dropped, invalid = tally.fields[:_NUM_BASE_FIELDS]
    return Counts(
        tokens=tokens,
        padding_tokens=padding_tokens,
        assignments=tally.experts,
        dropped=dropped,
        invalid=invalid,
        replay=_replay(tally.fields, tally, peaks[_LONGEST_RUN] if peaks else 0),
        **_of_scores(tally, peaks[_FIRST_SCORE_PEAK:]),
    )


def _of_scores(tally: Tally, peaks: Sequence[int]) -> Mapping[str, Any]:
    """Return the fields of `Counts` that come from score counters."""
    if not tally.scores:
        return {}
    of_router, of_calls = tally.scores[: -len(MICROBATCH_FIELDS)], tally.scores[-len(MICROBATCH_FIELDS) :]
    scores = ScoreStatistics.of(of_router, peaks, tally.experts)
    if scores is not None and not peaks:
        # of the total, as many numbers as experts would be most of a serialised snapshot
        scores = replace(scores, mean_probabilities=None)
    return {
        "scores": scores,
        "microbatch_max_violation": microbatch_max_violation(of_calls),
    }


def _share(fields: tuple[int, ...], tally: Tally) -> Share:
    base = dict(zip(SHARE_FIELDS, fields[:_NUM_BASE_FIELDS], strict=False))
    return Share(**base, replay=_replay(fields, tally, 0))


def _replay(fields: Sequence[int], tally: Tally, longest_run: int) -> ReplayTotals | None:
    sums = dict(zip(REPLAY_SUMS, fields[_NUM_BASE_FIELDS:], strict=True))
    if not any(sums.values()):
        return None
    return ReplayTotals(
        num_experts=len(tally.experts), top_k=_top_k(tally), **sums, longest_equal_run=max(0, longest_run)
    )


def _top_k(tally: Tally) -> int:
    """Return K: every token has K choices, and each is assigned, dropped or invalid."""
    tokens, _, assigned, dropped, invalid = tally.fields[:_NUM_BASE_FIELDS]
    return max(1, (assigned + dropped + invalid) // max(1, tokens))

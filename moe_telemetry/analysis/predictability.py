"""Predictability: how well the router of a layer, given the hidden states of the layer before, knows the load to come.

    result = predictability("trace", stage="train")
    print(result.pairs[0].recall, result.pairs[0].prediction.cosine, result.pairs[0].last_step.cosine)

What a router would choose for the states that the router before it has seen is known one layer early: early
enough to fetch experts, or to move them. The load of the step before costs nothing, and is what it has to beat.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from moe_telemetry.analysis.engines import Engine, analyse
from moe_telemetry.analysis.frames import Columns, FrameSource
from moe_telemetry.analysis.opening import check_top, nothing_left, open_source
from moe_telemetry.analysis.pair import PairPredictability
from moe_telemetry.analysis.pair_count import PairCount, as_pair
from moe_telemetry.analysis.predicting import predecessors
from moe_telemetry.analysis.selection import Selection
from moe_telemetry.analysis.tensors import steps_of_parts
from moe_telemetry.analysis.timeline import finish
from moe_telemetry.errors import TraceError
from moe_telemetry.trace.reader import Trace

__all__ = ["Predictability", "predictability"]

_NEEDED = ("hidden_states", "router_weights")


@dataclass(frozen=True, kw_only=True)
class Predictability(FrameSource):
    """The predictability of every router of a trace that has one before it."""

    trace: str
    selection: Selection
    pairs: tuple[PairPredictability, ...]
    """By stage, then in the order of the model."""
    notes: tuple[str, ...] = ()
    """What the trace lacks, and what the figures leave out."""

    def columns(self) -> Columns:
        """Return a row a router."""
        return Columns(tuple(_row(self.pairs[0])), [tuple(_row(pair).values()) for pair in self.pairs])

    def as_dict(self) -> dict[str, object]:
        """Return all figures as plain values, for JSON."""
        pairs = [{**_row(pair), "actual": pair.actual, "predicted": pair.predicted} for pair in self.pairs]
        return {"trace": self.trace, "selection": str(self.selection), "notes": self.notes, "pairs": pairs}


def predictability(
    trace: str | os.PathLike[str] | Trace,
    *,
    stage: str | None = None,
    decode: bool = False,
    steps: tuple[int | None, int | None] = (None, None),
    top: int | None = None,
    engine: Engine = "local",
    workers: int = 1,
) -> Predictability:
    """Return how well each router's choices are known from the hidden states of the router before it.

    The trace has to hold hidden states and router weights: `monitor.trace(..., hidden_states=True,
    router_weights=True)`. Arguments are those of `concentration`.

    Raises:
        TraceError: the trace cannot be read, lacks what is needed, or the selection leaves nothing of it.
        ConfigError: an argument is wrong.
    """
    source = open_source(trace, num_experts=1)  # JSON lines are refused for what they lack, whatever E is
    _check_tensors(source)
    check_top(top, source)
    previous_of = predecessors(source.routers)
    if not previous_of:
        names = ", ".join(str(router.key) for router in source.routers)
        raise TraceError(
            f"predictability needs two routers of one block, one after the other; {source.url} has {names}"
        )
    selection = Selection(stage=stage, decode=decode, steps=steps)
    spans = steps_of_parts(source.chunks(source.parts))
    analysis = PairCount(selection, top, previous_of, spans)
    counts = analyse(source, analysis, engine=engine, workers=workers)
    pairs = tuple(
        as_pair(group, folded, previous_of[group.router], top) for group, folded in finish(counts, analysis.measure)
    )
    if not any(pair.tokens for pair in pairs):
        raise _nothing_predicted(source, selection, pairs)
    notes = (*source.notes, *_notes(source, pairs))
    return Predictability(trace=source.url, selection=selection, pairs=pairs, notes=notes)


def _check_tensors(trace: Trace) -> None:
    missing = [name for name in _NEEDED if name not in trace.tensors]
    if missing:
        raise TraceError(
            f"{trace.url} holds no {' and no '.join(missing)}, which predictability needs: capture with "
            "monitor.trace(..., hidden_states=True, router_weights=True)"
        )


def _nothing_predicted(trace: Trace, selection: Selection, pairs: tuple[PairPredictability, ...]) -> TraceError:
    skipped = sum(pair.calls_without_tensors for pair in pairs)
    if skipped:
        return TraceError(
            f"none of {skipped} router calls of {trace.url} has its weights and the hidden states of the router "
            "before it on the same rank; capture with fewer losses (see moe-telemetry trace info)"
        )
    return nothing_left(trace, selection)


def _notes(trace: Trace, pairs: tuple[PairPredictability, ...]) -> Iterator[str]:
    if skipped := sum(pair.calls_without_tensors for pair in pairs):
        yield f"router calls without weights, or without hidden states of the router before: {skipped}, left out"
    if lost := sum(pair.tokens_not_finite for pair in pairs):
        yield f"tokens with a hidden state that is NaN or infinite, added up over routers: {lost}, left out"
    paired = {pair.router for pair in pairs}
    if unseen := [str(key) for key in predecessors(trace.routers) if key not in paired]:
        yield f"routers without a call: {', '.join(unseen)}"
    if biased := [router for router in trace.routers if router.is_biased]:
        yield (
            f"{len(biased)} routers choose by more than their scores: a bias is taken into account where the trace "
            "has it, a limit to groups of experts is not"
        )


def _row(pair: PairPredictability) -> dict[str, object]:
    return {
        "stage": pair.stage,
        "block": pair.router.block,
        "layer": pair.router.layer,
        "previous_layer": pair.previous.layer,
        "num_experts": pair.num_experts,
        "top": pair.top,
        "tokens": pair.tokens,
        "recall": pair.recall,
        "chance_recall": pair.chance_recall,
        "cosine": pair.prediction.cosine,
        "last_step_cosine": pair.last_step.cosine,
        "spearman": pair.prediction.spearman,
        "last_step_spearman": pair.last_step.spearman,
        "hot_overlap": pair.prediction.hot_overlap,
        "last_step_hot_overlap": pair.last_step.hot_overlap,
        "steps": pair.num_steps,
        "calls": pair.num_calls,
        "calls_without_tensors": pair.calls_without_tensors,
        "tokens_not_finite": pair.tokens_not_finite,
    }

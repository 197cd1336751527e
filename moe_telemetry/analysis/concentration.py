"""Concentration: how few experts of a router do how much of the work, and whether the hot ones stay hot.

result = concentration("trace", stage="train", top=16)
print(result.layers[0].coverage(16), result.layers[0].uniform(16), result.layers[0].persistence)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from moe_telemetry.analysis.calls import COLUMNS, Calls
from moe_telemetry.analysis.counting import Tail, count_experts
from moe_telemetry.analysis.engines import Engine, analyse
from moe_telemetry.analysis.frames import Columns, FrameSource
from moe_telemetry.analysis.measures import default_top, hottest
from moe_telemetry.analysis.opening import check_top, nothing_left, open_source
from moe_telemetry.analysis.selection import Selection
from moe_telemetry.analysis.timeline import Folded, Group, Timeline, Vector, finish
from moe_telemetry.errors import ConfigError
from moe_telemetry.identity import RouterKey
from moe_telemetry.trace.reader import Chunk, Trace

__all__ = ["Concentration", "ConcentrationCount", "LayerConcentration", "concentration"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConcentration:
    """The load of one router in one stage; a ratio over nothing is None."""

    stage: str
    router: RouterKey
    num_experts: int
    """E, as the model has it."""
    top: int
    """N, how many experts count as hot."""
    num_steps: int
    """Captured steps with a call of the router."""
    num_calls: int
    tokens: int
    """Real tokens, as the selection takes them."""
    padding_tokens: int
    tokens_not_kept: int
    """Tokens of these calls beyond the limit of the capture, which nobody knows anything about."""
    assignments: tuple[int, ...]
    """Choices of each expert by real tokens, `[E]`."""
    unmade: int
    """Choices that were not made: -1 in the trace."""
    invalid: int
    """Ids of E or more in the trace."""
    hot_overlap: int
    """Experts that are hot in a step and in the captured step before, added up over steps."""
    hot_possible: int
    """As many as could have been: the larger of the two hot sets, which have N experts where N have any load."""
    hot_by_chance: int
    """E times as many as would have been if each step's hot experts were drawn at random."""

    @property
    def unique_experts(self) -> int:
        """Experts with any load."""
        return sum(count > 0 for count in self.assignments)

    @property
    def coverage_curve(self) -> tuple[float, ...] | None:
        """Share of all assignments that the 1, 2, ... E hottest experts take, `[E]`."""
        total = sum(self.assignments)
        if not total:
            return None
        return tuple(covered / total for covered in accumulate(sorted(self.assignments, reverse=True)))

    def coverage(self, top: int | None = None) -> float | None:
        """Return the share of all assignments that the `top` hottest experts take; N where not given.

        Raises:
            ConfigError: there are not so many experts.
        """
        curve, count = self.coverage_curve, self.top if top is None else top
        if not 1 <= count <= self.num_experts:
            raise ConfigError(f"coverage({top}): expected 1 to {self.num_experts}, the experts of {self.router}")
        return None if curve is None else curve[count - 1]

    def uniform(self, top: int | None = None) -> float:
        """Return the coverage of a balanced router: top / E."""
        return (self.top if top is None else top) / self.num_experts

    @property
    def coverage_over_uniform(self) -> float | None:
        """How many times more the N hottest experts take than in a balanced router."""
        coverage = self.coverage()
        return None if coverage is None else coverage / self.uniform()

    @property
    def persistence(self) -> float | None:
        """Share of the N hottest experts of a step that are among the N hottest of the next captured step, too."""
        return self.hot_overlap / self.hot_possible if self.hot_possible else None

    @property
    def chance_persistence(self) -> float | None:
        """What `persistence` would be if the hot experts of each step were drawn at random: N / E for full sets."""
        return self.hot_by_chance / (self.num_experts * self.hot_possible) if self.hot_possible else None

    def hottest(self, count: int) -> tuple[int, ...]:
        """Return the `count` most loaded experts, hottest first."""
        ranked = sorted(range(self.num_experts), key=lambda expert: (-self.assignments[expert], expert))
        return tuple(expert for expert in ranked[:count] if self.assignments[expert])


@dataclass(frozen=True, kw_only=True)
class Concentration(FrameSource):
    """The concentration of every router of a trace."""

    trace: str
    selection: Selection
    layers: tuple[LayerConcentration, ...]
    """By stage, then in the order of the model."""
    notes: tuple[str, ...] = ()
    """What the trace lacks."""

    def columns(self) -> Columns:
        """Return a row an expert: its load, its place among the hottest and what those up to it cover."""
        rows = [row for layer in self.layers for row in _expert_rows(layer)]
        return Columns(_EXPERT_COLUMNS, rows)

    def layer_columns(self) -> Columns:
        """Return a row a router."""
        rows = [tuple(_layer_row(layer).values()) for layer in self.layers]
        return Columns(tuple(_layer_row(self.layers[0])), rows)

    def as_dict(self) -> dict[str, object]:
        """Return all figures as plain values, for JSON."""
        layers = [
            {**_layer_row(layer), "assignments": layer.assignments, "coverage_curve": layer.coverage_curve}
            for layer in self.layers
        ]
        return {"trace": self.trace, "selection": str(self.selection), "notes": self.notes, "layers": layers}


@dataclass(frozen=True)
class ConcentrationCount:
    """What is counted for it; an `Analysis`."""

    selection: Selection
    top: int | None

    def count(self, trace: Trace, chunk: Chunk) -> Iterator[Timeline]:
        """Yield assignments per expert."""
        for batch in trace.batches(chunk, COLUMNS):
            yield count_experts(Calls.of(batch, self.selection, trace.experts_of))

    def measure(self, _group: Group, previous: Vector | None, current: Vector, /) -> tuple[int, ...]:
        """Return how many hot experts are hot again, of how many, and E times how many by chance."""
        if previous is None:
            return 0, 0, 0
        num_experts = len(current) - len(Tail)
        top = self.top or default_top(num_experts)
        before, now = hottest(previous[:num_experts], top), hottest(current[:num_experts], top)
        if not before or not now:
            return 0, 0, 0
        return len(before & now), max(len(before), len(now)), len(before) * len(now)


def concentration(
    trace: str | os.PathLike[str] | Trace,
    *,
    stage: str | None = None,
    decode: bool = False,
    steps: tuple[int | None, int | None] = (None, None),
    top: int | None = None,
    num_experts: int | None = None,
    engine: Engine = "local",
    workers: int = 1,
) -> Concentration:
    """Return how concentrated the load of every router of a trace is.

    Args:
        trace: Folder or URL of a trace, or a trace that is open.
        stage: Only this stage; None takes all, each by itself.
        decode: Only tokens whose sequence in their call is one token long.
        steps: First step, and the first one that is left out again.
        top: N, how many experts count as hot; None for an eighth of E.
        num_experts: E, where the trace is a file of JSON lines that does not say.
        engine: `local` or `ray`.
        workers: Processes of the local engine.

    Raises:
        TraceError: the trace cannot be read, or the selection leaves nothing of it.
        ConfigError: an argument is wrong.
    """
    source = open_source(trace, num_experts=num_experts)
    check_top(top, source)
    analysis = ConcentrationCount(Selection(stage=stage, decode=decode, steps=steps), top)
    counts = analyse(source, analysis, engine=engine, workers=workers)
    layers = tuple(_layer(group, folded, top) for group, folded in finish(counts, analysis.measure))
    if not any(layer.tokens for layer in layers):
        raise nothing_left(source, analysis.selection)
    return Concentration(trace=source.url, selection=analysis.selection, layers=layers, notes=source.notes)


def _layer(group: Group, folded: Folded, top: int | None) -> LayerConcentration:
    num_experts = len(folded.total) - len(Tail)
    total = folded.total.tolist()
    overlap, possible, by_chance = folded.measures
    return LayerConcentration(
        stage=group.stage,
        router=group.router,
        num_experts=num_experts,
        top=top or default_top(num_experts),
        num_steps=folded.num_steps,
        num_calls=total[Tail.CALLS],
        tokens=total[Tail.TOKENS],
        padding_tokens=total[Tail.PADDING_TOKENS],
        tokens_not_kept=total[Tail.TOKENS_NOT_KEPT],
        assignments=tuple(total[:num_experts]),
        unmade=total[Tail.UNMADE],
        invalid=total[Tail.INVALID],
        hot_overlap=overlap,
        hot_possible=possible,
        hot_by_chance=by_chance,
    )


_EXPERT_COLUMNS = ("stage", "block", "layer", "expert", "assignments", "share", "place", "coverage", "uniform")


def _expert_rows(layer: LayerConcentration) -> Iterator[tuple[object, ...]]:
    curve, total = layer.coverage_curve, sum(layer.assignments)
    ranked = sorted(range(layer.num_experts), key=lambda expert: (-layer.assignments[expert], expert))
    place = {expert: number for number, expert in enumerate(ranked, start=1)}
    for expert, count in enumerate(layer.assignments):
        share, covered = (None, None) if curve is None else (count / total, curve[place[expert] - 1])
        uniform = layer.uniform(place[expert])
        yield (layer.stage, *layer.router, expert, count, share, place[expert], covered, uniform)


def _layer_row(layer: LayerConcentration) -> dict[str, object]:
    return {
        "stage": layer.stage,
        "block": layer.router.block,
        "layer": layer.router.layer,
        "num_experts": layer.num_experts,
        "top": layer.top,
        "tokens": layer.tokens,
        "unique_experts": layer.unique_experts,
        "coverage": layer.coverage(),
        "uniform_coverage": layer.uniform(),
        "coverage_over_uniform": layer.coverage_over_uniform,
        "persistence": layer.persistence,
        "chance_persistence": layer.chance_persistence,
        "steps": layer.num_steps,
        "calls": layer.num_calls,
        "padding_tokens": layer.padding_tokens,
        "tokens_not_kept": layer.tokens_not_kept,
        "unmade": layer.unmade,
        "invalid": layer.invalid,
    }

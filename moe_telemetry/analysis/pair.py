"""PairPredictability: how well one router's load was known a layer early, from sums over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_telemetry.analysis.measures import cosine, default_top, fixed_point, from_fixed_point, hottest, spearman
from moe_telemetry.analysis.timeline import Vector
from moe_telemetry.identity import RouterKey

__all__ = ["Likeness", "PairPredictability"]


class Likeness(NamedTuple):
    """How alike two loads are, added up over steps in whole numbers; a mean over nothing is None."""

    cosine_sum: int = 0
    cosine_count: int = 0
    spearman_sum: int = 0
    spearman_count: int = 0
    hot_shared: int = 0
    hot_possible: int = 0

    @classmethod
    def of(cls, one: Vector, other: Vector, top: int | None) -> Likeness:
        """Return how alike the loads of one step are, with `top` experts as the hot ones."""
        angle, rank = cosine(one, other), spearman(one, other)
        count = top or default_top(len(one))
        hot = hottest(one, count), hottest(other, count)
        return cls(
            cosine_sum=0 if angle is None else fixed_point(angle),
            cosine_count=int(angle is not None),
            spearman_sum=0 if rank is None else fixed_point(rank),
            spearman_count=int(rank is not None),
            hot_shared=len(hot[0] & hot[1]),
            hot_possible=max(map(len, hot)) if all(hot) else 0,
        )

    @property
    def cosine(self) -> float | None:
        """Mean over steps of the cosine of the two loads."""
        return from_fixed_point(self.cosine_sum, self.cosine_count)

    @property
    def spearman(self) -> float | None:
        """Mean over steps of their rank correlation, of steps in which neither load is constant."""
        return from_fixed_point(self.spearman_sum, self.spearman_count)

    @property
    def hot_overlap(self) -> float | None:
        """Share of the hottest experts that the two have in common."""
        return self.hot_shared / self.hot_possible if self.hot_possible else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PairPredictability:
    """What the router of a layer says about its load when it is given the hidden states of the router before it."""

    stage: str
    router: RouterKey
    previous: RouterKey
    """The router before it in the same block."""
    num_experts: int
    """E of the later router."""
    top: int
    """How many experts count as hot."""
    num_steps: int
    num_calls: int
    """Calls with hidden states and weights."""
    calls_without_tensors: int
    """Calls that could not be used: the capture has no hidden states or no weights for them."""
    tokens: int
    """Real tokens with a prediction."""
    tokens_not_finite: int
    """Real tokens without one: a hidden state is NaN or infinite."""
    hits: int
    """Choices that were predicted for their own token."""
    choices: int
    chance_hits: int
    """E times as many as random predictions would hit."""
    actual: tuple[int, ...]
    """Choices of each expert, `[E]`."""
    predicted: tuple[int, ...]
    """Predicted choices of each expert, `[E]`."""
    prediction: Likeness
    """Predicted against actual load, step by step."""
    last_step: Likeness
    """The load of the captured step before against the actual one."""

    @property
    def recall(self) -> float | None:
        """Share of all choices that were predicted for their own token: top-k recall."""
        return self.hits / self.choices if self.choices else None

    @property
    def chance_recall(self) -> float | None:
        """What `recall` would be for random predictions: K / E."""
        return self.chance_hits / (self.num_experts * self.choices) if self.choices else None

"""What a replay check counted of one router, as plain whole numbers, and the ratios formed of them last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

__all__ = [
    "REPLAY_COUNTERS",
    "REPLAY_SUMS",
    "ReplayTotals",
    "chance_agreement",
    "chance_zero_overlap",
    "pooled_agreement",
]

REPLAY_COUNTERS = (
    ("replayed", "sum"),
    ("missing", "sum"),
    ("malformed", "sum"),
    ("out_of_range", "sum"),
    ("repeated", "sum"),
    ("placeholder", "sum"),
    ("checked", "sum"),
    ("zero_overlap", "sum"),
    ("shared_experts", "sum"),
    ("tie_checked", "sum"),
    ("tie_shared_experts", "sum"),
    ("routed_padding", "sum"),
    ("longest_equal_run", "max"),
)
"""The counters of a comparison in the order of its vector, with how steps, layers and ranks combine them."""

REPLAY_SUMS = tuple(name for name, reduction in REPLAY_COUNTERS if reduction == "sum")
"""The counters that are added up; all but the longest run."""

_BLIND_BELOW = 0.05


def chance_agreement(num_experts: int, top_k: int) -> float:
    """Return K / E, the agreement of random routes with the router's own."""
    return top_k / num_experts


def chance_zero_overlap(num_experts: int, top_k: int) -> float:
    """Return C(E - K, K) / C(E, K), the share of random routes that share no expert with the router's own."""
    return math.comb(num_experts - top_k, top_k) / math.comb(num_experts, top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayTotals:
    """The counts of one router's replay check; every ratio over nothing is None.

    The six classes from `missing` to `checked` add up to `replayed`.
    """

    num_experts: int
    top_k: int
    replayed: int = 0
    """Rows of valid tokens."""
    missing: int = 0
    """Rows without a route: all ids negative."""
    malformed: int = 0
    """Rows with some negative ids, but not all."""
    out_of_range: int = 0
    """Rows with an id of E or more."""
    repeated: int = 0
    """Rows in which an expert occurs twice."""
    placeholder: int = 0
    """Rows equal to the row before in token order of the same sequence."""
    checked: int = 0
    """Every other row: those that are compared."""
    zero_overlap: int = 0
    """Checked rows that share no expert with the router's own choice."""
    shared_experts: int = 0
    """Experts that checked rows share with the router's own choice; K a row where all agree."""
    tie_checked: int = 0
    """Checked rows whose selection scores were known."""
    tie_shared_experts: int = 0
    """Of those rows, replayed experts that score at least as high as the k-th own expert."""
    routed_padding: int = 0
    """Rows of padding that carry a route: a sign that rows and tokens are out of step."""
    longest_equal_run: int = 0
    """Longest run of equal real rows within a sequence; 1 where no row repeats, 0 where no row is real."""

    @classmethod
    def from_vector(cls, values: Sequence[int], *, num_experts: int, top_k: int) -> ReplayTotals:
        """Return the totals of a vector in the order of `REPLAY_COUNTERS`."""
        names = (name for name, _ in REPLAY_COUNTERS)
        return cls(num_experts=num_experts, top_k=top_k, **dict(zip(names, map(int, values), strict=True)))

    def __add__(self, other: ReplayTotals) -> ReplayTotals:
        """Return both together; sums add, the longest run is the longer one. E and K are those of `self`."""
        merged = {
            name: max(getattr(self, name), getattr(other, name))
            if reduction == "max"
            else getattr(self, name) + getattr(other, name)
            for name, reduction in REPLAY_COUNTERS
        }
        return ReplayTotals(num_experts=self.num_experts, top_k=self.top_k, **merged)

    def __sub__(self, earlier: ReplayTotals) -> ReplayTotals:
        """Return what was counted after `earlier`; the longest run stays that of `self`."""
        later = {name: getattr(self, name) - getattr(earlier, name) for name in REPLAY_SUMS}
        return replace(self, **later)

    def as_dict(self) -> dict[str, int]:
        """Return the fields by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def shared(self) -> float:
        """Sum over checked rows of |replayed and own| / K."""
        return self.shared_experts / self.top_k

    @property
    def fallback(self) -> int:
        """Valid tokens for which a replay uses the router's own choice."""
        return self.replayed - self.checked - self.placeholder

    @property
    def agreement(self) -> float | None:
        """Mean share of replayed experts that the router chose itself, over checked rows."""
        return _ratio(self.shared_experts, self.checked * self.top_k)

    @property
    def tie_tolerant_agreement(self) -> float | None:
        """Agreement where an expert that ties with the k-th own expert counts as shared; None without scores."""
        return _ratio(self.tie_shared_experts, self.tie_checked * self.top_k)

    @property
    def zero_overlap_ratio(self) -> float | None:
        """Share of checked rows that share no expert with the router's own choice."""
        return _ratio(self.zero_overlap, self.checked)

    @property
    def coverage(self) -> float | None:
        """Share of replayed rows that could be checked."""
        return _ratio(self.checked, self.replayed)

    @property
    def fallback_ratio(self) -> float | None:
        """Share of valid tokens for which a replay uses the router's own choice."""
        return _ratio(self.fallback, self.replayed)

    @property
    def chance_agreement(self) -> float:
        """Agreement of random routes: K / E."""
        return chance_agreement(self.num_experts, self.top_k)

    @property
    def chance_zero_overlap(self) -> float:
        """Zero-overlap ratio of random routes: C(E - K, K) / C(E, K)."""
        return chance_zero_overlap(self.num_experts, self.top_k)

    @property
    def chance_corrected_agreement(self) -> float | None:
        """(agreement - K / E) / (1 - K / E): 1 is perfect, 0 is chance; None where K = E."""
        if self.agreement is None or self.top_k == self.num_experts:
            return None
        return (self.agreement - self.chance_agreement) / (1 - self.chance_agreement)

    @property
    def blind(self) -> bool:
        """True where fewer than 5 % of random rows would share no expert, so zero overlap shows nothing."""
        return self.chance_zero_overlap < _BLIND_BELOW

    def exceeds(self, zero_overlap_ratio: float = 0.01, *, min_checked: int = 100) -> bool | None:
        """Return whether the zero-overlap ratio is above the limit; None where too few rows were checked."""
        if self.checked < max(min_checked, 1):
            return None
        return self.zero_overlap / self.checked > zero_overlap_ratio


def pooled_agreement(layers: Iterable[ReplayTotals]) -> float | None:
    """Return one agreement for several routers, weighted by checked rows; None where none was checked."""
    totals = list(layers)
    checked = sum(layer.checked for layer in totals)
    return math.fsum(layer.shared for layer in totals) / checked if checked else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None

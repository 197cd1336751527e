"""Rows that an engine left over from an earlier forward: one row many times, where tokens differ.

Letters: T rows (tokens), K experts a token, R runs of equal rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_telemetry.replay.classes import RowClass, usable_rows
from moe_telemetry.replay.evidence import Evidence, shared_fraction

__all__ = ["Stale", "find_stale_rows"]

_SHORTEST_RUN = 4
"""Shorter runs happen by honest repetition and by the copied last row."""
_LONG_RUN = 8
"""From this length on, and always where K = 1, rounding alone does not spoil half of a run."""


class Stale(NamedTuple):
    """Runs of equal rows that the router's own choice does not have."""

    rows: int
    """Copied rows in such runs, in the layer that has most of them."""
    usable: int
    """Rows that a replay would use there."""
    longest_run: int
    agreement: float
    """Mean agreement of all usable rows there, copies included."""
    agreement_elsewhere: float | None
    """Mean agreement of the rows outside such runs."""


def find_stale_rows(evidence: Evidence, chance: float) -> Stale | None:
    """Return the layer with most stale rows, or None where none has any; `chance` is that of unrelated rows."""
    found = [stale for layer in evidence.layers if (stale := _in_layer(evidence, layer, chance)) is not None]
    return max(found, key=lambda stale: stale.rows, default=None)


def _in_layer(evidence: Evidence, layer: int, chance: float) -> Stale | None:
    order_T = evidence.geometry.in_token_order()
    classes_T = evidence.classes_TL[order_T, layer]
    copies_T, usable_T = classes_T == RowClass.PLACEHOLDER, usable_rows(classes_T)
    shared_T = shared_fraction(evidence.replayed_TLK[order_T, layer], evidence.own_TLK[order_T, layer])
    if not bool(copies_T.any()):
        return None
    outside = float(shared_T[usable_T & ~copies_T].mean())
    run_T = (~copies_T).cumsum(0) - 1
    copies_R = torch.zeros(int(run_T[-1]) + 1).index_add_(0, run_T, copies_T.float())
    shared_R = torch.zeros_like(copies_R).index_add_(0, run_T, shared_T * copies_T)
    # a run that the router chose itself, as for a repeated token, agrees as well as other rows do
    limit_R = torch.where(copies_R >= _LONG_RUN - 1, (outside + chance) / 2, outside / 2)
    shortest = _SHORTEST_RUN if evidence.own_TLK.shape[2] > 1 else _LONG_RUN
    stale_R = (copies_R >= shortest - 1) & (shared_R < limit_R * copies_R)
    if not bool(stale_R.any()):
        return None
    stale_T = stale_R[run_T] & copies_T
    elsewhere_T = usable_T & ~stale_R[run_T]
    return Stale(
        rows=int(stale_T.sum()),
        usable=int(usable_T.sum()),
        longest_run=int(copies_R[stale_R].max()) + 1,
        agreement=float(shared_T[usable_T].mean()),
        agreement_elsewhere=float(shared_T[elsewhere_T].mean()) if bool(elsewhere_T.any()) else None,
    )

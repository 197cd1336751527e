"""Shades of an expert's load over its layer's mean: numbers from 0 to 127, their colours and their legend."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["ABSENT", "DEAD", "LEGEND", "NUM_COLOURS", "PALETTE", "merged", "shade_of", "shades_of"]

NUM_COLOURS = 128
"""The lower half of a palette; the upper half is greys, from black to white."""

_STOPS = ((33, 102, 172), (146, 197, 222), (247, 247, 247), (244, 165, 80), (166, 70, 4))
"""Colours at a quarter of the mean, a half, the mean, twice and four times the mean; beyond them it stays so."""
_OCTAVES = len(_STOPS) - 1
_MEAN = 60
_LAST = 2 * _MEAN
ABSENT, DEAD = _LAST + 1, _LAST + 2
"""No such expert, or a layer that placed nothing; an expert without a token in a layer that placed some."""


def shade_of(relative_load: float) -> int:
    """Return the shade of a load above 0: factors of the mean, from 1/4 to 4."""
    place = math.log2(relative_load) / _OCTAVES + 0.5
    return round(min(1.0, max(0.0, place)) * _LAST)


def shades_of(assignments: Sequence[int]) -> bytes:
    """Return the shade of every expert of a layer."""
    total, num_experts = sum(assignments), len(assignments)
    if not total:
        return bytes([ABSENT]) * num_experts
    return bytes(shade_of(load * num_experts / total) if load else DEAD for load in assignments)


def merged(shades: bytes, size: int) -> bytes:
    """Return one shade for every `size` neighbours: the one farthest from the mean, so that none is hidden."""
    if size == 1:
        return shades
    groups = (shades[start : start + size] for start in range(0, len(shades), size))
    return bytes(max(group, key=lambda shade: abs(shade - _MEAN)) for group in groups)


def _colour(shade: int) -> tuple[int, ...]:
    """Return the colour of a shade, between two of `_STOPS`."""
    place = shade / _LAST * _OCTAVES
    before = min(int(place), _OCTAVES - 1)
    pairs = zip(_STOPS[before], _STOPS[before + 1], strict=True)
    return tuple(round(low + (high - low) * (place - before)) for low, high in pairs)


def _palette() -> bytes:
    special = {ABSENT: (200, 200, 200), DEAD: (20, 20, 20)}
    colours = [special.get(shade) or _colour(min(shade, _LAST)) for shade in range(NUM_COLOURS)]
    greys = [(grey, grey, grey) for grey in (255 * place // (NUM_COLOURS - 1) for place in range(NUM_COLOURS))]
    return bytes(channel for colour in (*colours, *greys) for channel in colour)


PALETTE = _palette()
"""Red, green and blue of all 256 numbers."""

LEGEND = (
    ("0", DEAD),
    ("<=1/4", 0),
    ("1/2", _MEAN // 2),
    ("1", _MEAN),
    ("2", 3 * _MEAN // 2),
    (">=4", _LAST),
    ("none", ABSENT),
)
"""What is written beside which shade."""

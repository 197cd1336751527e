"""What a client would rather have: the formats and the compression that its headers ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["accepts_gzip", "prefers_openmetrics"]

_OPENMETRICS = "application/openmetrics-text"
_VERSIONS = {_OPENMETRICS: ("1.0.0", "0.0.1", ""), "text/plain": ("0.0.4", "1.0.0", "")}


class Wish(NamedTuple):
    """One entry of an Accept header."""

    media_type: str
    version: str
    weight: float


def prefers_openmetrics(accept: str) -> bool:
    """Tell whether an Accept header would rather have OpenMetrics than the plain text format.

    OpenMetrics has to be named, in a version that we speak, and to be worth as much as plain text at least:
    who accepts anything, as browsers and curl do, gets what people read most easily.
    """
    wishes = [wish for wish in _wishes(accept) if wish.version in _VERSIONS.get(wish.media_type, ("",))]
    openmetrics = max((wish.weight for wish in wishes if wish.media_type == _OPENMETRICS), default=0.0)
    return openmetrics > 0 and openmetrics >= _weight_of_text(wishes)


def _weight_of_text(wishes: list[Wish]) -> float:
    # the most specific entry decides, whatever weight a wider one has
    for media_type in ("text/plain", "text/*", "*/*"):
        weights = [wish.weight for wish in wishes if wish.media_type == media_type]
        if weights:
            return max(weights)
    return 0.0


def accepts_gzip(accept_encoding: str) -> bool:
    """Tell whether an Accept-Encoding header allows gzip."""
    weights = {wish.media_type: wish.weight for wish in _wishes(accept_encoding)}
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


def _wishes(header: str) -> Iterator[Wish]:
    for entry in header.split(","):
        name, *parameters = entry.split(";")
        values = dict(_pair(text) for text in parameters)
        if name.strip():
            yield Wish(name.strip().lower(), values.get("version", ""), _weight(values.get("q", "1")))


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip().lower(), value.strip().strip('"')


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0  # who writes nonsense after q= gets no more than the least
    return weight if 0.0 <= weight <= 1.0 else 0.0

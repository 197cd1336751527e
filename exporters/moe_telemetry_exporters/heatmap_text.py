"""Text of heatmaps: the font, its width, and what of a user's words it can draw."""

from __future__ import annotations

import math

from PIL import ImageFont

__all__ = ["FONT", "printable", "text_width"]

FONT = ImageFont.load_default()
"""The font that comes with Pillow, so that pictures need none of the system's."""


def text_width(text: str) -> int:
    """Return the pixels that a line of text takes."""
    return math.ceil(FONT.getlength(text))


def printable(text: str, *, longest: int) -> str:
    """Return what every font can draw in one line: stages and blocks are the user's words."""
    plain = "".join(char if char.isascii() and char.isprintable() else "?" for char in text)
    return plain if len(plain) <= longest else f"{plain[: longest - 2]}.."

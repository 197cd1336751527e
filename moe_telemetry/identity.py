"""Who a router is: its block and its global layer number."""

from __future__ import annotations

import re
from typing import NamedTuple

from moe_telemetry.errors import ConfigError

__all__ = ["RouterKey"]

_BLOCK_ORDER = {"encoder": 0, "decoder": 1}
_TEXT = re.compile(r"(?P<block>.+)\.(?P<layer>\d+)", re.DOTALL)


class RouterKey(NamedTuple):
    """Identity of one router in a model, the same on every rank of a job.

    `block` is `decoder`, `encoder`, `mtp0`, `mtp1`, ... or a sub-model's own name;
    `layer` is the model's global layer index as people know it: where layer 0 is dense,
    the first router is layer 1.
    """

    block: str
    layer: int

    def __str__(self) -> str:
        """Return `block.layer`, as it stands in tags and tables."""
        return f"{self.block}.{self.layer}"

    @classmethod
    def parse(cls, text: str) -> RouterKey:
        """Read `block.layer`, the form that `str` writes.

        Raises:
            ConfigError: `text` has another form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(f"router key {text!r} is not of the form 'block.layer', as in 'decoder.3'")
        return cls(match["block"], int(match["layer"]))

    @property
    def order(self) -> tuple[int, str, int, int]:
        """Sort key: encoder, decoder, then other blocks; numbers as numbers (2 before 10)."""
        name = self.block.rstrip("0123456789")
        number = self.block[len(name) :]
        return _BLOCK_ORDER.get(self.block, 2), name, int(number or -1), self.layer

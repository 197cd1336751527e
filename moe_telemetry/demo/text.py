"""Training text that is on every machine: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Batch", "batches", "read_sources"]

Batch = tuple[Tensor, Tensor]
"""Token ids and attention mask, int64 `[B, S]` each; padding is 0 in both."""


def read_sources(num_bytes: int = 2_000_000) -> list[bytes]:
    """Return the top-level modules of the standard library, in the order of their names, up to a size."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources: list[bytes] = []
    for path in sorted(folder.glob("*.py")):
        sources.append(path.read_bytes())
        if sum(map(len, sources)) > num_bytes:
            break
    return sources


def batches(
    sources: list[bytes], *, batch_size: int, sequence_length: int, rank: int, num_ranks: int
) -> Iterator[Batch]:
    """Yield batches for ever; each rank sees files of its own, cut into sequences, the last one padded."""
    mine = sources[rank::num_ranks]
    pieces: list[bytes] = []
    for turn in count():
        # another offset each time round, so that no batch comes twice
        for source in mine:
            text = source[turn * 17 :]
            pieces += [text[start : start + sequence_length] for start in range(0, len(text), sequence_length)]
            while len(pieces) >= batch_size:
                yield _batch(pieces[:batch_size], sequence_length)
                del pieces[:batch_size]


def _batch(pieces: list[bytes], sequence_length: int) -> Batch:
    ids_BS = torch.zeros(len(pieces), sequence_length, dtype=torch.int64)
    mask_BS = torch.zeros_like(ids_BS)
    for row, piece in enumerate(pieces):
        ids_BS[row, : len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        mask_BS[row, : len(piece)] = 1
    return ids_BS, mask_BS

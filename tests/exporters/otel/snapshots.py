"""Snapshots that these tests export, and the series that a receiver should have of them."""

from __future__ import annotations

from dataclasses import replace

from moe_telemetry import RouterKey, Snapshot
from moe_telemetry.testing import make_snapshot
from tests.stack.otlp_receivers import Key

TOKENS = "moe.router.tokens"


def expected_series(snapshot: Snapshot) -> dict[Key, float]:
    constant = {"run": snapshot.run, **snapshot.labels}
    return {(name, frozenset({**constant, **labels}.items())): value for name, labels, value in snapshot.samples()}


def full_snapshot(step: int) -> Snapshot:
    """A snapshot that has every metric."""
    return make_snapshot(
        step=step,
        num_layers=4,
        stages=("train", "eval"),
        per_expert=True,
        replayed=True,
        labels={"team": "a"},
        expert_parallel_ranks=4,
    )


def with_tokens(step: int, tokens: int, *, layer: int = 0) -> Snapshot:
    """A snapshot of one layer whose counter of tokens is at `tokens`."""
    snapshot = make_snapshot(step=step, num_layers=1, first_layer=layer)
    (record,) = snapshot.layers.values()
    total = {"train": replace(record.total["train"], tokens=tokens)}
    return replace(snapshot, layers={RouterKey("decoder", layer): replace(record, total=total)})

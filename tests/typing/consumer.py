"""A user's code, type-checked against the installed wheel by scripts/check_wheel.py; never run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from typing_extensions import assert_type

import moe_telemetry as mt


class Sink:
    """An exporter of the user's own: the protocol asks for no base class."""

    def export(self, snapshot: mt.Snapshot, /) -> None:
        for name, labels, value in snapshot.samples():
            assert_type(name, str)
            assert_type(labels, Mapping[str, str])
            assert_type(value, float)

    def close(self) -> None: ...


def train(model: nn.Module, mask: Tensor) -> None:
    exporter: mt.Exporter = Sink()
    config = mt.TelemetryConfig(every_n_steps=5, labels={"team": "moe"})
    with mt.watch(model, "prometheus", exporter, config=config, per_expert=True) as monitor:
        assert_type(monitor, mt.Monitor)
        with monitor.stage("rollout"), monitor.pause(), monitor.valid_tokens(mask):
            model(mask)
        assert_type(monitor.step(1), mt.Snapshot | None)
        monitor.step()
        monitor.observe(mt.RouterKey("decoder", 3), mask)
        read(monitor.snapshot())
    monitor.close()


def read(snapshot: mt.Snapshot) -> None:
    assert_type(mt.Snapshot.from_json(snapshot.to_json()), mt.Snapshot)
    for key, layer in snapshot.layers.items():
        assert_type(key, mt.RouterKey)
        counts = layer.total["train"]
        assert_type(counts, mt.Counts)
        assert_type(counts.assignments, tuple[int, ...])
        assert_type(counts.tokens + counts.padding_tokens + counts.dropped + counts.invalid, int)


def point_at_a_router(model: nn.Module) -> mt.Monitor:
    try:
        return mt.watch([model], routers={"layers.*.gate": mt.RouterSpec(num_experts=8, top_k=2)})
    except (mt.NoRouterFoundError, mt.RouterKeyError) as error:
        raise mt.TelemetryError(str(error)) from error


assert_type(mt.METRICS, Mapping[str, mt.Metric])
assert_type(mt.__version__, str)

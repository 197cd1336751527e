"""Reporting: what of a run's identity reaches exporters."""

from __future__ import annotations

import moe_telemetry as mt
from moe_telemetry.testing import RecordingExporter, TinyMoe


def test_names_from_a_variable_in_another_encoding_can_be_written_by_every_exporter() -> None:
    model, exporter = TinyMoe(), RecordingExporter()
    names = {"run": "caf\udce9", "labels": {"team": "\udce9quipe", "place": "café"}}
    with mt.watch(model, exporter, routers=model.routers, **names):
        pass
    (snapshot,) = exporter.snapshots
    assert (snapshot.run, snapshot.labels) == ("caf?", {"team": "?quipe", "place": "café"})

"""Reporting: what of a run's identity reaches exporters, and when its last snapshot does."""

from __future__ import annotations

import subprocess
import sys

import moe_telemetry as mt
from moe_telemetry.testing import RecordingExporter, TinyMoe


def test_names_from_a_variable_in_another_encoding_can_be_written_by_every_exporter() -> None:
    model, exporter = TinyMoe(), RecordingExporter()
    names = {"run": "caf\udce9", "labels": {"team": "\udce9quipe", "place": "café"}}
    with mt.watch(model, exporter, routers=model.routers, **names):
        pass
    (snapshot,) = exporter.snapshots
    assert (snapshot.run, snapshot.labels) == ("caf?", {"team": "?quipe", "place": "café"})


AT_EXIT = """
import atexit
from moe_telemetry import watch
from moe_telemetry.testing import RecordingExporter, TinyMoe

class Sink(RecordingExporter):
    def close(self):
        print("closed after", len(self.snapshots))

atexit.register(print, "what the sink needs has ended")
model = TinyMoe()
monitor = watch(model, Sink(), routers=model.routers)
"""


def test_a_monitor_that_nobody_closes_is_closed_before_the_libraries_of_its_exporters_end() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["closed after 1", "what the sink needs has ended"]

"""What tests of `watch` ask of an endpoint."""

from __future__ import annotations

import time
from dataclasses import replace

from moe_telemetry import Snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter


def as_of_now(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, time=time.time())


def address_of(exporter: PrometheusExporter) -> str:
    return str(exporter.url).split("/")[2]

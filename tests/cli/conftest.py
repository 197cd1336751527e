"""An endpoint for the commands that read one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_telemetry_exporters.prometheus import PrometheusExporter


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    """A Prometheus exporter whose endpoint is up and shows nothing yet."""
    exporter = PrometheusExporter(port=0)
    exporter.start()
    yield exporter
    exporter.close()

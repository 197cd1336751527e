"""The page about Prometheus: its configurations are valid, its settings exist."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from moe_telemetry_exporters.prometheus import PrometheusExporter
from moe_telemetry_exporters.prometheus.pushgateway import PushgatewayExporter
from moe_telemetry_exporters.prometheus.textfile import PrometheusTextfileExporter

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "prometheus.md").read_text(encoding="utf-8")
EXPORTERS: tuple[Any, ...] = (PrometheusExporter, PrometheusTextfileExporter, PushgatewayExporter)


@pytest.mark.stack
@pytest.mark.parametrize("config", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_every_configuration_is_one_that_prometheus_reads(promtool: str, tmp_path: Path, config: str) -> None:
    (tmp_path / "prometheus.yml").write_text(config, encoding="utf-8")
    done = subprocess.run(
        [promtool, "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_setting_that_is_named_exists() -> None:
    known = {item.name for exporter in EXPORTERS for item in fields(exporter) if item.init} | {"per_expert"}
    named = set(re.findall(r"\b([a-z_]+)=", PAGE)) - {"job", "instance"}
    assert named <= known
    assert {"certfile", "linger_seconds", "remove_at_close", "group_by_run"} <= named

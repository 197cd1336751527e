"""Prometheus: an endpoint on each node, a file for node_exporter, or a Pushgateway."""

from moe_telemetry_exporters.prometheus.exporter import PrometheusExporter
from moe_telemetry_exporters.prometheus.pushgateway import PushgatewayExporter
from moe_telemetry_exporters.prometheus.textfile import PrometheusTextfileExporter

__all__ = ["PrometheusExporter", "PrometheusTextfileExporter", "PushgatewayExporter"]

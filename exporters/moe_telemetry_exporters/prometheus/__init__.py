"""Prometheus: an endpoint on each node, a file for node_exporter, or a Pushgateway."""

from moe_telemetry_exporters.prometheus.exporter import PrometheusExporter

__all__ = ["PrometheusExporter"]

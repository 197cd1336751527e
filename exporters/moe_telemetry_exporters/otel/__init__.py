"""OpenTelemetry: snapshots by OTLP, or as instruments of the program's own provider."""

from moe_telemetry_exporters.otel.exporter import OtelExporter

__all__ = ["OtelExporter"]

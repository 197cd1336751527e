"""An HTTP endpoint for a training process: paths and their routes, with TLS and passwords."""

from moe_telemetry_exporters.endpoint.server import MetricsServer

__all__ = ["MetricsServer"]

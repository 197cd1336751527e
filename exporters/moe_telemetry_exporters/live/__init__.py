"""The live page: what a run looks like now, without any other server."""

from moe_telemetry_exporters.live.view import LiveView

__all__ = ["LiveView"]

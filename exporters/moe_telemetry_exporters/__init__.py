"""The exporters of moe-telemetry, one module each; they are found by entry point, never imported by the core."""

__all__: list[str] = []

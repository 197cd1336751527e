"""Every exception that a user of moe-telemetry can meet.

TelemetryError
├── ConfigError             a field, an argument or an environment variable is wrong
│   ├── NoRouterFoundError  the model has no router that an adapter knows
│   ├── RouterKeyError      two routers claim one key
│   └── MaskError           a validity mask does not fit the tokens
├── LifecycleError          watched twice, or used after close()
├── ReductionError          the ranks of a job do not agree
├── ExporterError           an exporter is unknown, or its package is missing
├── SnapshotError           a serialised snapshot cannot be read
├── RoutesError             routes cannot be decoded, or do not fit the model
└── TraceError              a route trace cannot be written or read
"""

__all__ = [
    "ConfigError",
    "ExporterError",
    "LifecycleError",
    "MaskError",
    "NoRouterFoundError",
    "ReductionError",
    "RouterKeyError",
    "RoutesError",
    "SnapshotError",
    "TelemetryError",
    "TraceError",
]


class TelemetryError(Exception):
    """Base of all errors raised by moe-telemetry."""


class ConfigError(TelemetryError, ValueError):
    """A setting is wrong; the message names the field, the value and what is allowed."""


class NoRouterFoundError(ConfigError):
    """No adapter recognises a router in the model."""


class RouterKeyError(ConfigError):
    """Two routers have the same key; the message names both modules."""


class MaskError(ConfigError):
    """A validity mask does not fit the router's tokens; the message gives both shapes."""


class LifecycleError(TelemetryError, RuntimeError):
    """A model is watched twice, or a monitor is used after `close()`."""


class ReductionError(TelemetryError, RuntimeError):
    """The ranks of a job disagree, or one of them never arrives; the message names ranks."""


class ExporterError(TelemetryError, RuntimeError):
    """An exporter is unknown, or the package it needs is not installed."""


class SnapshotError(TelemetryError, ValueError):
    """A serialised snapshot is of another schema, or not a snapshot at all."""


class RoutesError(TelemetryError, ValueError):
    """Expert routes cannot be decoded, or do not fit the model they are meant for."""


class TraceError(TelemetryError, ValueError):
    """A route trace cannot be written where it should go, or its files cannot be read."""

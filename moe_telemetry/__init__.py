"""Telemetry for the routers of Mixture-of-Experts models.

    import moe_telemetry as mt

    with mt.watch(model, "prometheus", every_n_steps=10) as monitor:
        for step, batch in enumerate(loader):
            train(batch)
            monitor.step(step)

The public interface is what `__all__` names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_telemetry._version import __version__

if TYPE_CHECKING:
    from moe_telemetry.catalog import METRICS, Metric, Sample
    from moe_telemetry.config import TelemetryConfig
    from moe_telemetry.diagnostics import (
        ROUTER_DIAGNOSTIC_CHANNEL_COUNT,
        RouterDiagnosticChannel,
        build_router_diagnostics,
    )
    from moe_telemetry.errors import (
        ConfigError,
        ExporterError,
        LifecycleError,
        MaskError,
        NoRouterFoundError,
        ReductionError,
        RouterKeyError,
        RoutesError,
        SnapshotError,
        TelemetryError,
        TraceError,
    )
    from moe_telemetry.identity import RouterKey
    from moe_telemetry.monitor import Monitor, watch
    from moe_telemetry.plugins import Exporter
    from moe_telemetry.records import Counts, Health, LayerSnapshot
    from moe_telemetry.replay import Misalignment, RouteComparison, Routes, compare_routes, locate_misalignment
    from moe_telemetry.routers import RouterOutput, RouterSpec
    from moe_telemetry.snapshot import Snapshot

# A name is imported when it is first used, so that the command line starts without torch.
_HOMES = {
    "catalog": ("METRICS", "Metric", "Sample"),
    "config": ("TelemetryConfig",),
    "diagnostics": ("ROUTER_DIAGNOSTIC_CHANNEL_COUNT", "RouterDiagnosticChannel", "build_router_diagnostics"),
    "errors": (
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
    ),
    "identity": ("RouterKey",),
    "monitor": ("Monitor", "watch"),
    "plugins": ("Exporter",),
    "records": ("Counts", "Health", "LayerSnapshot"),
    "replay": ("Misalignment", "RouteComparison", "Routes", "compare_routes", "locate_misalignment"),
    "routers": ("RouterOutput", "RouterSpec"),
    "snapshot": ("Snapshot",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "METRICS",
    "ROUTER_DIAGNOSTIC_CHANNEL_COUNT",
    "ConfigError",
    "Counts",
    "Exporter",
    "ExporterError",
    "Health",
    "LayerSnapshot",
    "LifecycleError",
    "MaskError",
    "Metric",
    "Misalignment",
    "Monitor",
    "NoRouterFoundError",
    "ReductionError",
    "RouteComparison",
    "RouterDiagnosticChannel",
    "RouterKey",
    "RouterKeyError",
    "RouterOutput",
    "RouterSpec",
    "Routes",
    "RoutesError",
    "Sample",
    "Snapshot",
    "SnapshotError",
    "TelemetryConfig",
    "TelemetryError",
    "TraceError",
    "__version__",
    "build_router_diagnostics",
    "compare_routes",
    "locate_misalignment",
    "watch",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # a lazy module attribute is of any type
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

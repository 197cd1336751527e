"""For tests of your own: small models, realistic snapshots, a recording exporter, and the contract of exporters.

class TestMyExporter(ExporterContract):
    def make_exporter(self, tmp_path):
        return MyExporter(tmp_path / "out")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_telemetry.testing.exporters import ExporterContract, RecordingExporter, make_snapshot
    from moe_telemetry.testing.models import TinyMoe, TinyRouter
    from moe_telemetry.testing.ranks import run_ranks
    from moe_telemetry.testing.traces import make_trace

# imported when first used: what is for exporters needs neither torch nor pytest
_HOME_OF = {
    "ExporterContract": "exporters",
    "RecordingExporter": "exporters",
    "TinyMoe": "models",
    "TinyRouter": "models",
    "make_snapshot": "exporters",
    "make_trace": "traces",
    "run_ranks": "ranks",
}

__all__ = [
    "ExporterContract",
    "RecordingExporter",
    "TinyMoe",
    "TinyRouter",
    "make_snapshot",
    "make_trace",
    "run_ranks",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # a lazy module attribute is of any type
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

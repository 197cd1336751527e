"""Exporters and adapters, found by their entry points: the core never names one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

from moe_telemetry.config import TelemetryConfig
from moe_telemetry.environment import fields_from_env, misspelt_variables, variables_of
from moe_telemetry.errors import ExporterError
from moe_telemetry.snapshot import Scope, Snapshot

__all__ = ["Exporter", "exporter_scope", "load_adapters", "resolve_exporter", "warn_of_misspelt_variables"]

_logger = logging.getLogger("moe_telemetry")
_PREFIX = "MOE_TELEMETRY_"

_EXPORTERS = "moe_telemetry.exporters"
_ADAPTERS = "moe_telemetry.adapters"
_DISTRIBUTION = "moe-telemetry"


@runtime_checkable
class Exporter(Protocol):
    """Where snapshots go.

    An exporter is made on every rank and used on few, so its constructor only keeps its settings.
    All its methods are called from one thread of its own; what they raise is counted and logged, and
    never reaches training. It may have a class attribute `scope`: `"job"` (the default) to be used
    once a job, `"node"` to be used once a node; and a method `start()`, called before the first
    `export`.
    """

    def export(self, snapshot: Snapshot, /) -> None:
        """Take one snapshot."""

    def close(self) -> None:
        """Write what is buffered and let go of every resource."""


def exporter_scope(exporter: object) -> Scope:
    """Return whether `exporter` is used once a job or once a node."""
    scope: Scope = getattr(exporter, "scope", "job")
    return scope


def resolve_exporter(exporter: str | Exporter) -> tuple[str, Exporter]:
    """Return (name, exporter) of a name, with settings from `MOE_TELEMETRY_<NAME>_*`, or of an object.

    Raises:
        ExporterError: no exporter has that name, the package it needs is missing, or the object has
            no `export` and `close`.
    """
    if not isinstance(exporter, str):
        if not isinstance(exporter, Exporter) or isinstance(exporter, type):
            raise ExporterError(f"{exporter!r} is no exporter: expected a name, or an object with export() and close()")
        return type(exporter).__name__, exporter
    factory = _load_exporter(exporter)
    return exporter, factory(**fields_from_env(factory, _prefix_of(exporter)))


def warn_of_misspelt_variables(names: Sequence[str | Exporter], environ: Mapping[str, str] | None = None) -> None:
    """Log the `MOE_TELEMETRY_*` variables that nobody reads: those of the monitor and of the exporters in use.

    Settings of other exporters are left alone: the environment may be one for many programs.
    """
    used = [name for name in names if isinstance(name, str)]
    others = tuple(_prefix_of(name) for name in _installed() if name not in used)
    known = variables_of(TelemetryConfig, _PREFIX).union(
        *(variables_of(_load_exporter(name), _prefix_of(name)) for name in used)
    )
    for variable, similar in misspelt_variables(_PREFIX, known, environ).items():
        if not variable.startswith(others):
            hint = f"; did you mean {similar}?" if similar else ""
            _logger.warning("moe_telemetry: the variable %s is no setting and changes nothing%s", variable, hint)


def _prefix_of(exporter: str) -> str:
    return f"{_PREFIX}{exporter.upper().replace('-', '_')}_"


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_EXPORTERS)}


def _load_exporter(name: str) -> Any:  # noqa: ANN401  # a class of any exporter package
    found = _installed()
    if name not in found:
        raise ExporterError(f"no exporter named {name!r}; installed: {', '.join(sorted(found)) or 'none'}")
    try:
        return found[name].load()
    except ModuleNotFoundError as error:
        raise ExporterError(
            f"exporter {name!r} needs the package {error.name!r}: pip install {_what_brings(found[name], error)}"
        ) from error


def _what_brings(entry: EntryPoint, missing: ModuleNotFoundError) -> str:
    """Return what to install for a package that an exporter lacks; of our own exporters each has an extra."""
    is_own = entry.dist is None or entry.dist.name == _DISTRIBUTION
    return f"'{_DISTRIBUTION}[{entry.name}]'" if is_own else str(missing.name)


def load_adapters() -> Sequence[Callable[..., Any]]:
    """Return the `find_routers` function of every installed adapter, in the order of their names."""
    found: dict[str, EntryPoint] = {entry.name: entry for entry in entry_points(group=_ADAPTERS)}
    return [found[name].load() for name in sorted(found)]

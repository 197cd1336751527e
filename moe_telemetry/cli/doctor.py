"""`moe-telemetry doctor`: what is installed, and what is missing for which exporter."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, entry_points, version

from moe_telemetry._version import __version__

__all__ = ["add_parser", "run"]

_PACKAGES = (
    "torch",
    "transformers",
    "lightning",
    "prometheus-client",
    "opentelemetry-sdk",
    "wandb",
    "tensorboard",
    "pyarrow",
    "ray",
    "rich",
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="show versions, and which exporters and adapters can be used",
        epilog="Example: moe-telemetry doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; exit with 1 where an exporter or adapter cannot be used."""
    plugins = {"exporters": _plugins("moe_telemetry.exporters"), "adapters": _plugins("moe_telemetry.adapters")}
    findings: dict[str, object] = {
        "moe-telemetry": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        **plugins,
    }
    print(json.dumps(findings, indent=2) if arguments.json else _text(findings))
    return int(any(state != "ok" for states in plugins.values() for state in states.values()))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _plugins(group: str) -> dict[str, str]:
    return {entry.name: _state(entry.name, entry.load) for entry in sorted(entry_points(group=group))}


def _state(name: str, load: object) -> str:
    try:
        load()  # type: ignore[operator]
    except ModuleNotFoundError as error:
        return f"needs {error.name}: pip install 'moe-telemetry[{name}]'"
    except Exception as error:  # noqa: BLE001  # a plug-in may fail in any way; the doctor reports it
        return f"fails to load: {type(error).__name__}: {error}"
    return "ok"


def _text(findings: dict[str, object]) -> str:
    lines = []
    for name, value in findings.items():
        if isinstance(value, dict):
            lines += [name, *(f"  {key:<20}{item}" for key, item in value.items())]
        else:
            lines.append(f"{name:<22}{value}")
    return "\n".join(lines)

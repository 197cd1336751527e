"""`moe-telemetry rules`: the packaged alert rules for Prometheus, and their runbook."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from moe_telemetry.errors import TelemetryError

__all__ = ["add_parser", "run"]

_RUNBOOK = "runbook.md"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "rules",
        help="write the alert rules for Prometheus, and their runbook",
        description="Write the alert rules (*.yaml) and their runbook into a folder, over files of the same names. "
        "Name the rules in `rule_files` of Prometheus.",
        epilog="Example: moe-telemetry rules --out /etc/prometheus/rules",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to; made where missing")
    parser.add_argument(
        "--runbook-url",
        default=_RUNBOOK,
        metavar="URL",
        help="address of the runbook, which the alerts link to (runbook.md, beside the rules)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print their paths."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, text in _files():
        path = arguments.out / name
        # in the rules the name of the runbook stands in links alone
        linked = text if name == _RUNBOOK else text.replace(f"{_RUNBOOK}#", f"{arguments.runbook_url}#")
        path.write_text(linked, encoding="utf-8")
        print(path)
    return 0


def _files() -> Iterator[tuple[str, str]]:
    rules, runbook = _sources()
    for path in sorted(rules.glob("*.yaml")):
        yield path.name, path.read_text(encoding="utf-8")
    yield _RUNBOOK, runbook.read_text(encoding="utf-8")


def _sources() -> tuple[Path, Path]:
    """Return the folder of the rules and the path of the runbook: in the wheel, else in the source tree."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_grafana", package.parent / "grafana"):
        if (folder / "rules").is_dir():
            return folder / "rules", folder / _RUNBOOK
    raise TelemetryError(f"the alert rules are missing from this installation: no folder {package / '_grafana'}")

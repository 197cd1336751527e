"""`moe-telemetry dashboards`: the packaged Grafana dashboards, and the files that provision them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from moe_telemetry.cli.grafana_files import RUNBOOK, add_out, add_runbook_url, packaged, write

__all__ = ["add_parser", "run"]

# as they are in the packaged files
_DATASOURCE = "moe-prometheus"
_PATH = "/var/lib/grafana/dashboards/moe-telemetry"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "dashboards",
        help="write the Grafana dashboards, and the files that provision them",
        description="Write the dashboards (dashboards/*.json, to provision or to import by hand), the files that make "
        "Grafana find them (provisioning/, for GF_PATHS_PROVISIONING or to copy) and the runbook into a folder, over "
        "files of the same names.",
        epilog="Example: moe-telemetry dashboards --out grafana --datasource prometheus",
    )
    add_out(parser)
    add_runbook_url(parser, "panels and alerts")
    parser.add_argument(
        "--datasource",
        type=_uid,
        metavar="UID",
        help="uid of a Prometheus data source that Grafana has already; without it, one is provisioned for "
        "http://localhost:9090",
    )
    parser.add_argument(
        "--alerts",
        action="store_true",
        help="also write the alerts for Grafana to evaluate, where Prometheus does not load those of `moe-telemetry "
        "rules`: with both, every alert comes twice",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print their paths."""
    out, uid = arguments.out.resolve(), arguments.datasource or _DATASOURCE
    dashboards = packaged("dashboards/json/*.json").items()
    files = {name.replace("json/", ""): _of_user(text, arguments.runbook_url, uid) for name, text in dashboards}
    files |= {name: _at(out, text) for name, text in packaged("provisioning/dashboards/*.yaml").items()}
    if arguments.datasource is None:
        files |= packaged("provisioning/datasources/*.yaml")
    if arguments.alerts:
        alerts = packaged("provisioning/alerting/*.yaml").items()
        files |= {name: _of_user(text, arguments.runbook_url, uid) for name, text in alerts}
    write(files | packaged(RUNBOOK), arguments.out)
    for name in sorted((_optional() - files.keys()) & _present(arguments.out)):
        print(f"{arguments.out / name} is of an earlier call, and Grafana still reads it: remove it", file=sys.stderr)
    return 0


def _optional() -> set[str]:
    return {*packaged("provisioning/datasources/*.yaml"), *packaged("provisioning/alerting/*.yaml")}


def _present(out: Path) -> set[str]:
    return {path.relative_to(out).as_posix() for path in out.glob("provisioning/*/*.yaml")}


def _of_user(text: str, runbook_url: str, datasource: str) -> str:
    # in a dashboard the address is the value of a variable, in alerts the beginning of each link
    text = text.replace(_DATASOURCE, datasource)
    return text.replace(f'"{RUNBOOK}"', json.dumps(runbook_url)).replace(f"{RUNBOOK}#", f"{runbook_url}#")


def _at(out: Path, text: str) -> str:
    return text.replace(_PATH, json.dumps(str(out / "dashboards")))


def _uid(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a uid of up to 40 letters, digits, '-' and '_'")
    return text

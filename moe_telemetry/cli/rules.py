"""`moe-telemetry rules`: the packaged rules for Prometheus, an example of routing, and the runbook."""

from __future__ import annotations

import argparse

from moe_telemetry.cli.grafana_files import RUNBOOK, add_out, add_runbook_url, packaged, write

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "rules",
        help="write the alert rules for Prometheus, and their runbook",
        description="Write the alert and recording rules (*.yaml), their runbook, and an example of how Alertmanager "
        "may route them (alertmanager/routing.yml) into a folder, over files of the same names. Name the rules in "
        "`rule_files` of Prometheus. Alerts that Grafana evaluates instead: moe-telemetry dashboards --alerts.",
        epilog="Example: moe-telemetry rules --out /etc/prometheus/rules",
    )
    add_out(parser)
    add_runbook_url(parser, "the alerts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print their paths."""
    rules = {name.removeprefix("rules/"): text for name, text in packaged("rules/*.yaml").items()}
    # in the rules the name of the runbook stands in links alone
    linked = {name: text.replace(f"{RUNBOOK}#", f"{arguments.runbook_url}#") for name, text in rules.items()}
    write(linked | packaged("alertmanager/*.yml") | packaged(RUNBOOK), arguments.out)
    return 0

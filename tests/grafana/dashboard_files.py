"""The committed dashboards, as tests ask about them: panels, targets, variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent.parent / "grafana"
FILES = sorted((FOLDER / "dashboards" / "json").glob("*.json"))


@dataclass(frozen=True)
class Target:
    """A query of a panel of a dashboard."""

    dashboard: str
    panel: Mapping[str, Any]
    query: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel['title']} {self.query['refId']}"

    @property
    def expr(self) -> str:
        return str(self.query["expr"])

    @property
    def legend_labels(self) -> set[str]:
        return set(re.findall(r"{{(\w+)}}", self.query.get("legendFormat", "")))


DASHBOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text("utf-8")) for path in FILES}


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels, also those inside rows, and no rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def variables(dashboard: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


PANELS = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in panels(dashboard)]
TARGETS = [Target(name, panel, query) for name, panel in PANELS for query in panel.get("targets", ())]

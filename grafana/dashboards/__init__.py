"""The dashboards as code: one module each, and `DASHBOARDS`, their JSON by file name.

python -m scripts.generate_grafana      # writes json/*.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grafana.dashboards.expert_parallel import expert_parallel
from grafana.dashboards.health import health
from grafana.dashboards.layer import layer
from grafana.dashboards.overview import overview
from grafana.dashboards.replay import replay

__all__ = ["DASHBOARDS", "rendered"]

DASHBOARDS: Mapping[str, Callable[[], Dashboard]] = MappingProxyType(
    {
        "moe-overview": overview,
        "moe-layer": layer,
        "moe-replay": replay,
        "moe-expert-parallel": expert_parallel,
        "moe-telemetry-health": health,
    }
)


def rendered() -> dict[str, str]:
    """Return the JSON of every dashboard, by the name of its file; the same text every time."""
    return {f"{name}.json": _text(build()) for name, build in DASHBOARDS.items()}


def _text(builder: Dashboard) -> str:
    built = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
    for number, panel in enumerate(_panels(built["panels"]), start=1):
        panel["id"] = number
    _drop_surplus(built)
    return json.dumps(built, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _drop_surplus(built: dict[str, Any]) -> None:
    """Take out what the builders write unasked: fields of older schemas, and a place that would hide the links."""
    for link in built["links"]:
        del link["placement"]
    for variable in built["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min"):
            variable.pop(name, None)
    for panel in _panels(built["panels"]):
        if panel["type"] == "table":
            panel["options"].pop("footer", None)


def _panels(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all panels, also those inside rows."""
    return [each for panel in panels for each in (panel, *_panels(panel.get("panels", [])))]

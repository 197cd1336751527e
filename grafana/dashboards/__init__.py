"""The dashboards as code: one module each, and `DASHBOARDS`, their JSON by file name.

python -m scripts.generate_grafana      # writes json/*.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

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
    for link in built["links"]:
        del link["placement"]  # the builder's default would hide the links in a menu
    return json.dumps(built, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _panels(panels: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return all panels, also those inside rows."""
    return [each for panel in panels for each in (panel, *_panels(panel.get("panels", [])))]  # type: ignore[arg-type]

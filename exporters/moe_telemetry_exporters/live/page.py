"""The live page at `/` and its data at `/live.json`: one document that asks for nothing but its own endpoint."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache, partial
from importlib.resources import files

from moe_telemetry_exporters.endpoint.http import Reply, Request, Route
from moe_telemetry_exporters.live import LiveView

__all__ = ["live_routes"]

_STYLE = "style.css"
_SCRIPTS = ("base.js", "summary.js", "alerts.js", "heatmap.js", "curves.js", "table.js", "main.js")
"""In the order in which they need each other."""
_NO_SNIFFING = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def live_routes(view: LiveView) -> Mapping[str, Route]:
    """Return the routes that show `view`; they read the page's files when somebody first looks."""
    return {"/": _page, "/live.json": partial(_data, view)}


@lru_cache(maxsize=1)
def _document() -> tuple[bytes, str]:
    """Return the page, put together of the files in `assets/`, and the policy by which it runs its own script only."""
    folder = files("moe_telemetry_exporters.live") / "assets"
    style = (folder / _STYLE).read_text(encoding="utf-8")
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    html = (folder / "index.html").read_text(encoding="utf-8")
    html = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), policy


def _page(_: Request) -> Reply:
    body, policy = _document()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache", **_NO_SNIFFING}
    return Reply("text/html; charset=utf-8", body, headers)


def _data(view: LiveView, request: Request) -> Reply:
    chosen = {name: request.query[name][-1] for name in ("stage", "layer") if request.query.get(name)}
    document = view.document(stage=chosen.get("stage"), layer=chosen.get("layer"))
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return Reply("application/json", body, {"Cache-Control": "no-store", **_NO_SNIFFING})


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

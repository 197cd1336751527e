"""Draw the overview dashboard from a running Prometheus, for the picture in docs/grafana.md.

python -m scripts.draw_overview --prometheus http://127.0.0.1:9090 --run demo-120000

Grafana's components (npm, 430 MB, two minutes) draw the panels in a page, and Chromium takes a picture of it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from playwright.sync_api import sync_playwright

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "grafana" / "picture"
DASHBOARD = ROOT / "grafana" / "dashboards" / "json" / "moe-overview.json"
STEP_SECONDS = 2
SIZE = {"width": 1600, "height": 1044}  # the panels above the heatmap, which the page cannot draw
BROWSER = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


def main() -> None:
    """Ask, build, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prometheus", default="http://127.0.0.1:9090", metavar="URL", help="server that scrapes a run"
    )
    parser.add_argument("--run", required=True, help="the run to show")
    parser.add_argument("--seconds", type=int, default=150, metavar="N", help="how far to look back (150)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "overview.png", help="the picture")
    arguments = parser.parse_args()
    public = PAGE / "public"
    public.mkdir(exist_ok=True)
    (public / "answers.json").write_text(json.dumps(answers(arguments.prometheus, arguments.run, arguments.seconds)))
    (public / "dashboard.json").write_bytes(DASHBOARD.read_bytes())
    if not (PAGE / "node_modules").exists():
        _npm("install", "--ignore-scripts", "--no-audit", "--no-fund", "--legacy-peer-deps", "--no-package-lock")
    _npm("exec", "vite", "build")
    draw(arguments.out)


def answers(url: str, run: str, seconds: int) -> dict[str, Any]:
    """Return what Prometheus says to every query of the dashboard, and the run's alerts."""
    end = time.time()
    values = {"run": run, "stage": "train", "__rate_interval": "10s"}
    found: dict[str, Any] = {"range": [end - seconds, end]}
    found["alerts"] = _ask(url, "query", query=f'ALERTS{{run="{run}"}}', time=end)
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            expr = re.sub(r"\$([a-z_]+)", lambda name: values.get(name[1], ".+"), target["expr"])
            place = f"{panel['title']} {target['refId']}"
            if target["instant"]:
                found[place] = _ask(url, "query", query=expr, time=end)
            else:
                found[place] = _ask(url, "query_range", query=expr, start=end - seconds, end=end, step=STEP_SECONDS)
    return found


def draw(out: Path) -> None:
    """Take a picture of the built page."""
    handler = partial(_Silent, directory=str(PAGE / "dist"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(BROWSER))
        page = browser.new_page(viewport=SIZE)
        page.on("pageerror", lambda error: print("page:", error))
        page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        page.wait_for_selector("canvas")
        page.wait_for_timeout(3000)  # lines are drawn after the frame
        out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(out))
        browser.close()
        server.shutdown()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Log nothing: requests are no news."""


def _ask(url: str, path: str, **parameters: object) -> list[dict[str, Any]]:
    address = f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(address, timeout=30) as response:  # noqa: S310  # the user's own server
        found: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return found


def _npm(*arguments: str) -> None:
    subprocess.run(["npm", *arguments], cwd=PAGE, check=True)


if __name__ == "__main__":
    main()

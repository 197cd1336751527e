"""Take the picture of the live page for the docs: a real demo run whose routes are shifted, in a real browser.

    .venv/bin/python scripts/picture_live_page.py

Takes about a minute; needs chromium.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from playwright.sync_api import Error, Page, expect, sync_playwright

__all__ = ["main"]

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "live.png"
STEPS = 150
SECONDS = 240.0


def main() -> int:
    """Write the picture."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("needs chromium: make setup", file=sys.stderr)
        return 2
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--scenario", "shifted", "--steps", str(STEPS), "--serve", "--port", str(port), "--logdir", folder]
        demo = subprocess.Popen([sys.executable, "-m", "moe_telemetry.cli", "demo", *options])
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
                page = browser.new_page(viewport={"width": 1400, "height": 900})
                _open(page, f"http://127.0.0.1:{port}/")
                expect(page.locator("#window")).to_contain_text(f"step {STEPS}", timeout=1000 * SECONDS)
                page.locator("details.alert summary").first.click()
                PICTURE.parent.mkdir(exist_ok=True)
                page.screenshot(path=PICTURE, full_page=True)
        finally:
            demo.terminate()
            demo.wait(60)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")
    return 0


def _open(page: Page, url: str) -> None:
    """Open the page as soon as the run has one."""
    for _ in range(int(SECONDS)):
        with suppress(Error):  # nobody listens there yet
            page.goto(url)
            return
        page.wait_for_timeout(1000)
    raise TimeoutError(f"{url} did not come up within {SECONDS:.0f} s")


if __name__ == "__main__":
    sys.exit(main())

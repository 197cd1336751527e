"""The live page in a browser, as tests look at it."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from playwright.sync_api import Page

from moe_telemetry_exporters.prometheus import PrometheusExporter

__all__ = ["ARGUMENTS", "DESK", "PHONE", "Open", "Visit"]

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PHONE, DESK = (390, 844), (1400, 900)


class Visit:
    """A page that is looked at, and all that it asked for and complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, exporter: PrometheusExporter, hash_: str = "") -> Page:
        assert exporter.url is not None
        self.page.goto(exporter.url.replace("/metrics", f"/{hash_}"))
        return self.page


Open = Callable[..., Visit]

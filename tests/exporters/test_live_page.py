"""The live page at the endpoint: one document without strangers, and its data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from urllib.parse import quote

import pytest
from prometheus_client import CollectorRegistry

from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter(port=0)
    exporter.start()
    yield exporter
    exporter.close()


def _get(exporter: PrometheusExporter, path: str) -> tuple[dict[str, str], str]:
    with urllib.request.urlopen(str(exporter.url).replace("/metrics", path), timeout=10) as response:
        return dict(response.headers), response.read().decode()


def test_the_page_names_no_other_host_and_includes_nothing(exporter: PrometheusExporter) -> None:
    headers, page = _get(exporter, "/")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    # the names of XML vocabularies are no addresses that anybody asks
    assert set(re.findall(r"https?://[^\s'\"]+", page)) == {"http://www.w3.org/2000/svg", "https://user:password@host/"}
    assert not re.search(r"<(script|img|iframe|link)[^>]+(src|href)=\"(?!data:)", page)
    assert "@import" not in page
    assert "url(" not in page


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(exporter: PrometheusExporter) -> None:
    headers, page = _get(exporter, "/")
    rules = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert "unsafe" not in headers["Content-Security-Policy"]


def test_the_data_is_of_the_stage_and_the_layer_that_are_asked_for(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot(stages=("train", "a&b=c é")))
    headers, text = _get(exporter, f"/live.json?stage={quote('a&b=c é')}&layer=decoder.1")
    document = json.loads(text)
    assert (document["stage"], document["curves"]["layer"]) == ("a&b=c é", "decoder.1")
    assert headers["Cache-Control"] == "no-store"
    _, text = _get(exporter, "/live.json?stage=&layer=%00%ff&layer=&other=1")
    assert json.loads(text)["stage"] == "train"


def test_before_the_first_snapshot_page_and_data_are_there(exporter: PrometheusExporter) -> None:
    assert "<title>" in _get(exporter, "/")[1]
    assert json.loads(_get(exporter, "/live.json")[1])["state"] == "waiting"


def test_the_metrics_are_where_they_were(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot())
    assert "moe_router_tokens_total" in _get(exporter, "/metrics")[1]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        _get(exporter, "/assets/main.js")


def test_an_exporter_that_joins_a_registry_keeps_nothing_for_a_page() -> None:
    exporter = PrometheusExporter(registry=CollectorRegistry())
    exporter.start()
    exporter.export(make_snapshot())
    assert exporter._view.document()["state"] == "waiting"
    exporter.close()


def test_the_page_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from moe_telemetry_exporters.live import LiveView, page\n"
        "from moe_telemetry.testing import make_snapshot\n"
        "view = LiveView(); view.show(make_snapshot()); print(view.document()['step'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("10\n", "")


def _brightness(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    darker, brighter = sorted((_brightness(one), _brightness(other)))
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa_and_every_line_that_of_pictures(scheme: int) -> None:
    style = (files("moe_telemetry_exporters.live") / "assets" / "style.css").read_text(encoding="utf-8")
    rules = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", rules))
    for ground in ("page", "card", "soft"):
        for text in ("text", "dim", "accent", "critical", "warning", "info", "good"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for line in ("worst", "median", "own"):
        assert _contrast(colours[line], colours["card"]) >= 3, line
    # a transparent text has less of it
    assert "opacity" not in re.sub(r"@keyframes.*", "", style)

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

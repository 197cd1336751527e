"""Which format and which compression a client gets, by the headers that real clients send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_telemetry_exporters.endpoint.accept import accepts_gzip, prefers_openmetrics

PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
PROTOBUF_FIRST = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6," + PROMETHEUS_3
)
TEXT_FIRST = "text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    "accept",
    [
        PROMETHEUS_2_42,
        PROMETHEUS_3,
        PROTOBUF_FIRST,
        "application/openmetrics-text",
        "Application/OpenMetrics-Text; Version=1.0.0; charset=utf-8",
        'application/openmetrics-text; version="0.0.1"',
        "application/openmetrics-text, text/plain",
        "text/plain;q=0.5 , application/openmetrics-text ; q=0.5",
        "application/openmetrics-text;q=0.001, text/plain;q=0",
    ],
)
def test_openmetrics_for_who_names_it(accept: str) -> None:
    assert prefers_openmetrics(accept)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        BROWSER,
        TEXT_FIRST,
        "text/plain",
        "application/*",
        "application/openmetrics-text;q=0",
        "application/openmetrics-text;q=0, */*",
        "application/openmetrics-text;version=2.0.0",
        "application/openmetrics-text;q=many, text/plain",
        "application/openmetrics-text;q=0.5, text/*",
        "x-application/openmetrics-text-not",
        ",;=,;q=,",
    ],
)
def test_plain_text_for_all_others(accept: str) -> None:
    assert not prefers_openmetrics(accept)


@pytest.mark.parametrize("header", ["gzip", "deflate, GZIP;q=0.1", "*", "x-gzip", "br;q=1.0, gzip;q=0.8, *;q=0"])
def test_gzip_for_who_takes_it(header: str) -> None:
    assert accepts_gzip(header)


@pytest.mark.parametrize("header", ["", "identity", "gzip;q=0", "*;q=0", "gzip;q=0, *", "br", "gzipped"])
def test_no_gzip_for_all_others(header: str) -> None:
    assert not accepts_gzip(header)


@given(st.text(st.characters(codec="latin-1")))
def test_any_header_has_an_answer(header: str) -> None:
    assert prefers_openmetrics(header) in {False, True}
    assert accepts_gzip(header) in {False, True}

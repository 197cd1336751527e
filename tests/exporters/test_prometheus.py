"""PrometheusExporter: what a scrape shows, in every format, from every endpoint of a job."""

from __future__ import annotations

import gzip
import math
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from moe_telemetry import ConfigError, ExporterError, Snapshot
from moe_telemetry.catalog import METRICS, metric_of
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter
from moe_telemetry_exporters.prometheus.text import TextRenderer, label_text, number_text

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
ODD = 'a"b\\c\nd{e}=100%s,é漢🙂'

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _expected(snapshot: Snapshot) -> Series:
    constant = {"run": snapshot.run, **snapshot.labels}
    return {
        (name, frozenset({**constant, **labels}.items())): float(value)
        for name, labels, value in snapshot.samples("node")
    }


def _parsed(text: str, *, openmetrics: bool = False) -> Series:
    families = parse_openmetrics(text) if openmetrics else parse_text(text)  # type: ignore[no-untyped-call]
    samples = [sample for family in families for sample in family.samples]
    series = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(series) == len(samples), "a series came twice"
    return series


def _render(snapshot: Snapshot, *, openmetrics: bool = False) -> str:
    return TextRenderer().render(snapshot, openmetrics=openmetrics).decode()


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter(port=0)
    exporter.start()
    yield exporter
    exporter.close()


def _get(exporter: PrometheusExporter, query: str = "", **headers: str) -> tuple[dict[str, str], bytes]:
    assert exporter.url is not None
    request = urllib.request.Request(exporter.url + query, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return dict(response.headers), response.read()


# the text


@pytest.mark.parametrize("openmetrics", [False, True])
@pytest.mark.parametrize(
    "snapshot",
    [
        make_snapshot(),
        make_snapshot(stages=("train", "eval"), per_expert=True, labels={"team": "a"}),
        make_snapshot(run=ODD, labels={"team": ODD}, stages=(ODD,)),
        make_snapshot(window_steps=0),
        make_snapshot(node=1, num_nodes=2),
        make_snapshot(num_layers=0),
    ],
    ids=["plain", "experts", "odd text", "empty window", "second node", "no layer"],
)
def test_a_parser_reads_back_every_sample(snapshot: Snapshot, *, openmetrics: bool) -> None:
    text = _render(snapshot, openmetrics=openmetrics)
    assert _parsed(text, openmetrics=openmetrics) == _expected(snapshot)


def test_each_metric_has_its_help_and_type_once() -> None:
    families = list(parse_text(_render(make_snapshot(per_expert=True))))
    for family in families:
        name = family.name + "_total" * (family.type == "counter")
        assert (family.type, family.documentation) == (METRICS[name].kind, METRICS[name].help)
    assert max(Counter(family.name for family in families).values()) == 1


@given(text=st.text(st.characters(codec="utf-8")))
def test_any_label_value_is_read_back(text: str) -> None:
    line = f"metric{{{label_text({'name': text})}}} 1"
    # the parser of prometheus_client ends lines at more characters than the format does
    if len(line.splitlines()) == 1:
        (family,) = parse_text(line + "\n")
        assert family.samples[0].labels == {"name": text}


def test_numbers_are_exact_and_infinities_spelled_as_prometheus_does() -> None:
    values = [2**53 + 1, 0.1, 1e-07, math.inf, -math.inf, math.nan]
    assert [number_text(value) for value in values] == ["9007199254740993", "0.1", "1e-07", "+Inf", "-Inf", "NaN"]


def test_counters_beyond_float_precision_keep_their_last_digit() -> None:
    snapshot = make_snapshot(step=2**50 + 1)
    assert f" {256 * (2**50 + 1)}\n" in _render(snapshot)


def test_a_renderer_forgets_what_has_changed() -> None:
    renderer = TextRenderer()
    snapshots = [
        make_snapshot(),
        make_snapshot(step=20),
        make_snapshot(num_layers=5),
        make_snapshot(run="other"),
        replace(make_snapshot(), labels={"team": "a"}),
        make_snapshot(first_layer=4),
    ]
    for snapshot in snapshots:
        assert _parsed(renderer.render(snapshot, openmetrics=False).decode()) == _expected(snapshot)


def test_an_expert_series_is_one_line_without_created() -> None:
    text = _render(make_snapshot(num_layers=48, num_experts=128, per_expert=True))
    assert sum(line.startswith("moe_expert_assignments_total{") for line in text.splitlines()) == 48 * 128
    assert "_created" not in text


def test_the_default_export_of_61_layers_stays_below_2400_series() -> None:
    assert len(_parsed(_render(make_snapshot(num_layers=61, num_experts=256)))) <= 2400


def test_series_beyond_the_limit_are_cut_and_counted() -> None:
    snapshot = make_snapshot(num_layers=61, num_experts=256, per_expert=True, max_series=5000)
    series = _parsed(_render(snapshot))
    kept = sum(name == "moe_expert_assignments_total" for name, _ in series)
    assert len(series) == 5000
    assert series["moe_telemetry_series_dropped_total", frozenset({("run", "run-1")})] == 15_616 - kept


def test_15616_expert_series_are_rendered_in_far_less_than_the_client_library_takes() -> None:
    snapshot = make_snapshot(num_layers=61, num_experts=256, per_expert=True)
    exporter = PrometheusExporter(registry=CollectorRegistry())
    exporter.export(snapshot)
    renderer = TextRenderer()
    renderer.render(snapshot, openmetrics=True)

    def seconds(render: object) -> float:
        begin = time.thread_time()
        assert callable(render)
        render()
        return time.thread_time() - begin

    ours = min(seconds(lambda: renderer.render(snapshot, openmetrics=True)) for _ in range(5))
    assert ours < seconds(lambda: generate_latest(exporter._collector)) / 4


# the endpoints of a job


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_the_sum_over_all_endpoints_is_the_total_of_the_job(num_nodes: int) -> None:
    nodes = [
        make_snapshot(node=node, num_nodes=num_nodes, stages=("train", "eval"), per_expert=True)
        for node in range(num_nodes)
    ]
    summed: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
    for node in nodes:
        summed.update({(name, frozenset(labels.items())): value for name, labels, value in node.samples("node")})
    for name, labels, value in nodes[0].samples("job"):
        if metric_of(name).source != "process":
            assert summed[name, frozenset(labels.items())] == value


def test_gauges_and_expert_series_come_from_the_first_endpoint_only() -> None:
    first, second = (make_snapshot(node=node, num_nodes=2, per_expert=True) for node in (0, 1))
    first_names, second_names = ({sample.name for sample in node.samples("node")} for node in (first, second))
    assert {metric_of(name).source for name in first_names} == {"node", "job", "process"}
    assert {metric_of(name).source for name in second_names} == {"node", "process"}


# the endpoint


def test_prometheus_gets_openmetrics_compressed(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot())
    headers, body = _get(exporter, **{"Accept": OPENMETRICS, "Accept-Encoding": "gzip"})
    assert headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert headers["Content-Encoding"] == "gzip"
    assert _parsed(gzip.decompress(body).decode(), openmetrics=True) == _expected(make_snapshot())


def test_a_person_gets_plain_text(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot())
    headers, body = _get(exporter)
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert _parsed(body.decode()) == _expected(make_snapshot())


def test_a_scrape_may_ask_for_some_series(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot())
    _, body = _get(exporter, "?name[]=moe_telemetry_step&name[]=moe_load_cv_ratio")
    assert {name for name, _ in _parsed(body.decode())} == {"moe_telemetry_step", "moe_load_cv_ratio"}


def test_before_the_first_snapshot_a_scrape_is_empty_and_valid(exporter: PrometheusExporter) -> None:
    assert _get(exporter)[1] == b""
    assert _get(exporter, Accept=OPENMETRICS)[1] == b"# EOF\n"


def test_only_the_last_snapshot_is_shown(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot(num_layers=5))
    exporter.export(later := make_snapshot(step=20, first_layer=2, num_layers=1))
    assert _parsed(_get(exporter)[1].decode()) == _expected(later)


def test_ratios_over_nothing_are_absent(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot(window_steps=0))
    names = {name for name, _ in _parsed(_get(exporter)[1].decode())}
    assert not [name for name in names if name.startswith("moe_load")]
    assert "moe_router_tokens_total" in names


def test_ten_scrapes_in_a_row_are_equal(exporter: PrometheusExporter) -> None:
    exporter.export(make_snapshot())
    assert len({_get(exporter)[1] for _ in range(10)}) == 1


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/metrics", 405), ("GET", "/other", 404)])
def test_other_methods_and_paths_are_refused(exporter: PrometheusExporter, method: str, path: str, status: int) -> None:
    assert exporter.url is not None
    url = exporter.url.replace("/metrics", path)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10)
    assert caught.value.code == status
    caught.value.close()


def test_the_endpoint_listens_on_loopback_only() -> None:
    assert PrometheusExporter().address == "127.0.0.1"


def test_the_endpoint_works_over_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    exporter = PrometheusExporter(port=0, address="::1")
    try:
        exporter.start()
    except ExporterError as error:
        pytest.skip(str(error))
    assert exporter.url is not None
    assert exporter.url.startswith("http://[::1]:")
    exporter.export(make_snapshot())
    assert b"moe_telemetry_step" in _get(exporter)[1]
    exporter.close()


def test_a_taken_port_is_one_error_that_names_it_and_the_setting(exporter: PrometheusExporter) -> None:
    assert exporter.url is not None
    port = int(exporter.url.split(":")[2].split("/")[0])
    second = PrometheusExporter(port=port)
    with pytest.raises(ExporterError, match=rf"127\.0\.0\.1:{port}: Address already in use.*PROMETHEUS_PORT"):
        second.start()
    second.close()
    assert second.url is None


def test_an_address_of_another_machine_is_an_error_that_names_the_setting() -> None:
    other = PrometheusExporter(address="192.0.2.1", port=0)  # kept for documentation: nobody has it
    with pytest.raises(ExporterError, match=r"192\.0\.2\.1:0: .*MOE_TELEMETRY_PROMETHEUS_ADDRESS"):
        other.start()


def test_a_closed_endpoint_frees_its_port() -> None:
    first = PrometheusExporter(port=0)
    first.start()
    assert first.url is not None
    port = int(first.url.split(":")[2].split("/")[0])
    first.close()
    second = PrometheusExporter(port=port)
    second.start()
    second.close()


@pytest.mark.parametrize("port", [-1, 65536, True, "9464"])
def test_a_wrong_port_is_refused_when_it_is_made(port: int) -> None:
    with pytest.raises(ConfigError, match="port="):
        PrometheusExporter(port=port)


# a registry of the user's own


def test_a_users_registry_shows_the_same_series_and_no_endpoint_opens() -> None:
    registry = CollectorRegistry(auto_describe=True)
    exporter = PrometheusExporter(registry=registry)
    exporter.start()
    exporter.start()
    assert generate_latest(registry) == b""
    exporter.export(make_snapshot(labels={"team": "a"}))
    assert _parsed(generate_latest(registry).decode()) == _expected(make_snapshot(labels={"team": "a"}))
    assert registry.get_sample_value("moe_telemetry_step", {"run": "run-1", "team": "a"}) == 10
    assert exporter.url is None
    exporter.close()
    assert generate_latest(registry) == b""


def test_two_exporters_in_one_registry_are_an_error() -> None:
    registry = CollectorRegistry()
    first, second = PrometheusExporter(registry=registry), PrometheusExporter(registry=registry)
    first.start()
    with pytest.raises(ExporterError, match="has metrics of these names already"):
        second.start()
    second.close()
    first.export(make_snapshot())
    assert b"moe_telemetry_step" in generate_latest(registry)


# the real thing


@pytest.mark.stack
@pytest.mark.parametrize("per_expert", [False, True])
def test_promtool_finds_nothing_to_complain_about(promtool: str, *, per_expert: bool) -> None:
    snapshot = make_snapshot(stages=("train", "eval"), per_expert=per_expert, labels={"team": ODD}, run=ODD)
    done = subprocess.run(
        [promtool, "check", "metrics"], input=_render(snapshot).encode(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

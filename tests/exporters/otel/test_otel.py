"""OtelExporter: what a receiver gets by gRPC and by HTTP, in both temporalities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.resources import Resource

from moe_telemetry import RouterKey
from moe_telemetry.catalog import METRICS
from moe_telemetry.plugins import Exporter
from moe_telemetry.testing import ExporterContract, make_snapshot
from moe_telemetry_exporters.otel import OtelExporter
from moe_telemetry_exporters.otel.batches import batches, otel_unit
from moe_telemetry_exporters.otel.streams import Series, Streams
from tests.exporters.otel.snapshots import TOKENS, expected_series, full_snapshot, with_tokens
from tests.stack.otlp_receivers import Received, receiver


class TestOtelByHttp(ExporterContract):
    protocol = "http/protobuf"

    @pytest.fixture(autouse=True)
    def _receive(self) -> Iterator[None]:
        with receiver(self.protocol) as (self.received, self.url):
            yield

    def make_exporter(self, tmp_path: Path) -> Exporter:  # noqa: ARG002  # it writes no file
        return OtelExporter(endpoint=self.url, protocol=self.protocol)


class TestOtelByGrpc(TestOtelByHttp):
    protocol = "grpc"


# what arrives


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_a_receiver_has_every_sample(export: Callable[..., Received], temporality: str) -> None:
    received = export(*map(full_snapshot, (5, 10, 30)), temporality=temporality)
    assert received.values() == expected_series(full_snapshot(30))


def test_metrics_have_the_names_units_and_kinds_of_the_table(export: Callable[..., Received]) -> None:
    kinds = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
    found = {one.name: one for one in export(full_snapshot(10)).metrics()}
    table = {row.otel_name: row for row in METRICS.values() if row.otel_name in found}
    assert set(table) == set(found)
    assert TOKENS in found
    for name, row in table.items():
        assert (found[name].unit, found[name].description) == (otel_unit(row), row.help)
        assert found[name].WhichOneof("data") == kinds[row.kind]
    assert found[TOKENS].unit == "{token}"
    assert all(one.sum.is_monotonic for one in found.values() if one.WhichOneof("data") == "sum")


@pytest.mark.parametrize(
    ("name", "unit"),
    [("moe_load_cv_ratio", "1"), ("moe_telemetry_run_finished", ""), ("moe_telemetry_overhead_seconds_total", "s")],
)
def test_a_gauge_that_is_no_ratio_has_no_unit_that_prometheus_would_call_one(name: str, unit: str) -> None:
    assert otel_unit(METRICS[name]) == unit


def test_the_histogram_is_one_point_a_layer_with_the_bounds_of_the_table(export: Callable[..., Received]) -> None:
    points = export(make_snapshot(num_layers=5)).points("moe.expert.relative.load")
    assert len(points) == 5
    assert [*points[0].explicit_bounds] == [0, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 4, 8]
    assert sum(points[0].bucket_counts) == points[0].count == points[0].sum == 10 * 8


def test_a_large_model_arrives_whole_in_requests_that_a_receiver_takes(export: Callable[..., Received]) -> None:
    snapshot = make_snapshot(num_layers=61, num_experts=256, per_expert=True, labels={"note": "n" * 100})
    received = export(snapshot)
    assert received.values() == expected_series(snapshot)
    assert len(received.points("moe.expert.assignments")) == 61 * 256
    assert len(received.requests) > 4
    assert max(received.sizes) < 1_000_000


@settings(max_examples=25)
@given(st.integers(0, 12), st.integers(1, 20), st.integers(10_000, 60_000))
def test_however_requests_are_cut_no_point_is_lost_or_comes_twice(layers: int, experts: int, max_bytes: int) -> None:
    snapshot = make_snapshot(num_layers=layers, num_experts=experts, per_expert=True, labels={"a": "é" * 99})
    streams = Streams(snapshot, 0)
    streams.take(snapshot, "job")
    received = Received()
    for batch in batches(streams, max_bytes, is_delta=False):
        received.add(encode_metrics(batch.data(Resource({}))).SerializeToString(), {})
    assert received.values() == expected_series(snapshot)
    num_parts = sum(name.endswith(("_bucket", "_sum")) for name, _ in received.values())
    assert received.num_points == len(received.values()) - num_parts
    assert max(received.sizes) < max_bytes


def test_text_that_utf8_cannot_say_costs_no_other_series(export: Callable[..., Received]) -> None:
    received = export(make_snapshot(labels={"odd": "a\ud800b"}))
    assert len(received.values()) == len(expected_series(make_snapshot()))
    assert {dict(labels)["odd"] for _, labels in received.values()} == {"a?b"}


# what comes and goes


def test_layers_that_are_gone_have_no_points(export: Callable[..., Received]) -> None:
    received = export(make_snapshot(num_layers=2), make_snapshot(step=20, num_layers=1, first_layer=1))
    layers = {dict(labels).get("layer") for _, labels in received.last().values()}
    assert layers == {"1", None}


def test_a_ratio_over_nothing_is_absent_and_not_its_last_value(export: Callable[..., Received]) -> None:
    received = export(make_snapshot(replayed=True), make_snapshot(step=20, window_steps=0, replayed=True))
    assert received.points("moe.replay.zero.overlap.ratio")
    assert not received.last().points("moe.replay.zero.overlap.ratio")
    assert received.last().points(TOKENS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_absent_and_its_neighbours_are_there(
    export: Callable[..., Received], value: float
) -> None:
    snapshot = make_snapshot(num_layers=2)
    first = snapshot.layers[RouterKey("decoder", 0)]
    scores = first.window["train"].scores
    assert scores is not None
    window = {"train": replace(first.window["train"], scores=replace(scores, logit_max=value))}
    broken = replace(snapshot, layers={**snapshot.layers, RouterKey("decoder", 0): replace(first, window=window)})
    received = export(snapshot, replace(broken, time=snapshot.time + 1))
    layers = {key[1] for key in received.last().values() if key[0] == "moe_logit_max"}
    assert [dict(labels)["layer"] for labels in layers] == ["1"]


@pytest.mark.parametrize(("temporality", "expected"), [("cumulative", [10, 30, 60, 65]), ("delta", [10, 20, 30, 5])])
def test_a_counter_that_starts_anew_goes_on_from_where_it_was(
    export: Callable[..., Received], temporality: str, expected: list[int]
) -> None:
    snapshots = [with_tokens(step, raw) for step, raw in ((1, 10), (2, 30), (3, 60), (4, 5))]
    points = export(*snapshots, temporality=temporality).points(TOKENS)
    assert [point.as_int for point in points] == expected


def test_a_histogram_that_starts_anew_goes_on_whole(export: Callable[..., Received]) -> None:
    before, after = make_snapshot(step=30, num_layers=1, seed=1), make_snapshot(step=1, num_layers=1, seed=2)
    received = export(before, after)
    (layer,) = after.layers.values()
    (point,) = received.last().points("moe.expert.relative.load")
    assert point.count == point.sum == sum(point.bucket_counts) == 31 * 8
    assert all(count >= 0 for count in point.bucket_counts)
    assert layer.relative_load["train"][-1] == 8


def test_a_second_monitor_of_the_same_exporter_counts_on(protocol: str, sink: tuple[Received, str]) -> None:
    received, url = sink
    exporter = OtelExporter(endpoint=url, protocol=protocol)
    for raw in (60, 80):  # larger than before, so only the close between tells that the count began anew
        exporter.start()
        exporter.export(with_tokens(1, raw))
        exporter.close()
    assert [point.as_int for point in received.points(TOKENS)] == [60, 140]
    assert len(received.resources()) == 1


def test_a_layer_that_comes_back_is_not_below_what_it_was(export: Callable[..., Received]) -> None:
    received = export(with_tokens(1, 40), with_tokens(2, 7, layer=3), with_tokens(3, 50))
    points = [dict(labels)["layer"] for name, labels in received.values() if name == "moe_router_tokens_total"]
    assert sorted(points) == ["0", "3"]
    assert [point.as_int for point in received.points(TOKENS)] == [40, 7, 50]


def test_intervals_of_deltas_touch_and_never_overlap(export: Callable[..., Received]) -> None:
    same_time = replace(with_tokens(4, 40), time=with_tokens(3, 30).time)
    back = replace(with_tokens(5, 50), time=with_tokens(1, 10).time)
    received = export(*(with_tokens(n, n * 10) for n in (1, 2, 3)), same_time, back, temporality="delta")
    points = received.points(TOKENS)
    spans = [(point.start_time_unix_nano, point.time_unix_nano) for point in points]
    assert all(start < end for start, end in spans)
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert sum(point.as_int for point in points) == 50


def test_points_of_a_cumulative_stream_have_one_start(export: Callable[..., Received]) -> None:
    points = export(*(with_tokens(n, n) for n in (1, 2, 3))).points(TOKENS)
    assert len({point.start_time_unix_nano for point in points}) == 1
    assert points[0].start_time_unix_nano < points[0].time_unix_nano


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
def test_a_series_never_falls_and_grows_by_what_was_counted(raws: list[int]) -> None:
    series, totals = Series(0), []
    for raw in raws:
        series.take(raw)
        totals.append(series.total)
    growth = [now - before if now >= before else now for before, now in zip([0, *raws], raws, strict=False)]
    assert totals == [sum(growth[: place + 1]) for place in range(len(raws))]

"""OtelExporter on a MeterProvider of the program's own: its readers see the last snapshot, and each count once."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Histogram, MeterProvider, ObservableCounter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    InMemoryMetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.view import View

from moe_telemetry.plugins import Exporter
from moe_telemetry.testing import ExporterContract, make_snapshot
from moe_telemetry_exporters.otel import OtelExporter
from moe_telemetry_exporters.otel import exporter as otel_exporter
from tests.exporters.otel.snapshots import TOKENS, expected_series, full_snapshot, with_tokens
from tests.stack.otlp_receivers import Key, Received, receiver

DELTAS: dict[type, AggregationTemporality] = {
    ObservableCounter: AggregationTemporality.DELTA,
    Histogram: AggregationTemporality.DELTA,
}


class Program:
    """A program that has set up OpenTelemetry for itself."""

    def __init__(self, *views: View, delta: bool = False) -> None:
        self.reader = InMemoryMetricReader(DELTAS if delta else None)
        self.provider = MeterProvider([self.reader], views=views, shutdown_on_exit=False)

    def collect(self) -> Received:
        received = Received()
        if (data := self.reader.get_metrics_data()) is not None:
            received.add(encode_metrics(data).SerializeToString(), {})
        return received


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    yield program
    program.provider.shutdown()


class TestOtelOnAProvider(ExporterContract):
    def make_exporter(self, tmp_path: Path) -> Exporter:  # noqa: ARG002  # it writes no file
        return OtelExporter(meter_provider=MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False))


def test_a_reader_collects_every_sample(program: Program) -> None:
    exporter = OtelExporter(meter_provider=program.provider)
    exporter.start()
    exporter.export(full_snapshot(10))
    # of the histogram there are the windows that were exported, here the first ten steps as one
    expected = _without_histogram(expected_series(full_snapshot(10)))
    assert _without_histogram(program.collect().values()) == expected
    exporter.close()


def _without_histogram(series: dict[Key, float]) -> dict[Key, float]:
    return {key: value for key, value in series.items() if "relative_load" not in key[0]}


def test_the_histogram_has_the_relative_load_of_every_window(program: Program) -> None:
    exporter = OtelExporter(meter_provider=program.provider)
    snapshots = [make_snapshot(step=step, window_steps=1, num_layers=2) for step in (1, 2, 3)]
    for snapshot in snapshots:
        exporter.export(snapshot)
    expected = {key: value for key, value in expected_series(snapshots[-1]).items() if "relative_load" in key[0]}
    found = {key: value for key, value in program.collect().values().items() if "relative_load" in key[0]}
    assert found == pytest.approx(expected)
    exporter.close()


def test_the_global_provider_of_the_program_is_used() -> None:
    # a process of its own, since a global provider cannot be taken back
    code = (
        "from opentelemetry import metrics\n"
        "from opentelemetry.sdk.metrics import MeterProvider\n"
        "from opentelemetry.sdk.metrics.export import InMemoryMetricReader\n"
        "from moe_telemetry.testing import make_snapshot\n"
        "from moe_telemetry_exporters.otel import OtelExporter\n"
        "metrics.set_meter_provider(MeterProvider([reader := InMemoryMetricReader()]))\n"
        "OtelExporter().export(make_snapshot(step=10, num_layers=1))\n"
        "found = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics\n"
        "print([one.data.data_points[0].value for one in found if one.name == 'moe.router.tokens'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[2560]"


def test_an_endpoint_goes_before_the_global_provider(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_exporter, "get_meter_provider", lambda: program.provider)
    with receiver("http/protobuf") as (received, url):
        exporter = OtelExporter(endpoint=url)
        exporter.export(make_snapshot())
        exporter.close()
    assert received.values() == expected_series(make_snapshot())
    assert not program.collect().requests


def test_a_program_without_a_provider_has_none_made_for_it() -> None:
    OtelExporter().close()
    assert not isinstance(metrics.get_meter_provider(), MeterProvider)


@pytest.mark.parametrize(("delta", "expected"), [(False, [10, 30, 60, 65]), (True, [10, 20, 30, 5])])
def test_a_counter_that_starts_anew_goes_on_from_where_it_was(*, delta: bool, expected: list[int]) -> None:
    program = Program(delta=delta)
    exporter = OtelExporter(meter_provider=program.provider)
    found = []
    for step, raw in enumerate((10, 30, 60, 5)):
        exporter.export(with_tokens(step + 1, raw))
        found += [point.as_int for point in program.collect().points(TOKENS)]
    assert found == expected
    exporter.close()


def test_layers_and_ratios_that_are_gone_have_no_points(program: Program) -> None:
    exporter = OtelExporter(meter_provider=program.provider)
    exporter.export(make_snapshot(num_layers=2, replayed=True))
    program.collect()
    exporter.export(make_snapshot(step=20, num_layers=1, first_layer=1, window_steps=0, replayed=True))
    found = program.collect()
    gone = {key for key in found.values() if ("layer", "0") in key[1] and "relative_load" not in key[0]}
    assert not gone
    assert not found.points("moe.replay.agreement.ratio")
    exporter.close()


def test_after_a_close_the_last_snapshot_is_collected_once_and_then_nothing(program: Program) -> None:
    exporter = OtelExporter(meter_provider=program.provider)
    exporter.export(with_tokens(1, 10))
    program.collect()
    exporter.export(with_tokens(2, 30))
    exporter.close()
    assert [point.as_int for point in program.collect().points(TOKENS)] == [30]
    assert not program.collect().points(TOKENS)


def test_what_was_collected_before_the_close_is_not_collected_again(program: Program) -> None:
    exporter = OtelExporter(meter_provider=program.provider)
    exporter.export(with_tokens(1, 10))
    program.collect()
    exporter.close()
    assert not program.collect().points(TOKENS)


def test_the_provider_lives_on_after_a_close(program: Program) -> None:
    exporter = OtelExporter(meter_provider=program.provider)
    exporter.export(make_snapshot())
    exporter.close()
    program.collect()
    program.provider.get_meter("mine").create_counter("moe.router.tokens.of.mine").add(1)
    data = program.reader.get_metrics_data()
    assert data is not None
    assert "moe.router.tokens.of.mine" in {
        metric.name for part in data.resource_metrics for scope in part.scope_metrics for metric in scope.metrics
    }


def test_a_second_monitor_counts_on_without_a_warning_of_double_instruments(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = OtelExporter(meter_provider=program.provider)
    for raw in (60, 80):
        exporter.start()
        exporter.export(with_tokens(1, raw))
        exporter.close()
        last = program.collect().points(TOKENS)
    assert [point.as_int for point in last] == [140]
    other = OtelExporter(meter_provider=program.provider)
    other.export(replace(with_tokens(1, 7), run="run-2"))
    assert [point.as_int for point in program.collect().points(TOKENS)] == [7]
    assert not caplog.records
    other.close()


def test_two_exporters_share_the_instruments_and_each_shows_its_run(program: Program) -> None:
    exporters = [OtelExporter(meter_provider=program.provider) for _ in range(2)]
    for place, exporter in enumerate(exporters):
        exporter.export(replace(with_tokens(1, 10 + place), run=f"run-{place}"))
    assert sorted(point.as_int for point in program.collect().points(TOKENS)) == [10, 11]
    for exporter in exporters:
        exporter.close()


def test_series_beyond_the_limit_of_the_provider_are_cut_counted_and_told(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = make_snapshot(num_layers=10, num_experts=256, per_expert=True)
    exporter = OtelExporter(meter_provider=program.provider)
    with caplog.at_level(logging.WARNING, "moe_telemetry"):
        exporter.export(snapshot)
        exporter.export(replace(snapshot, time=snapshot.time + 1))
    found = program.collect()
    points = found.points("moe.expert.assignments")
    assert len(points) == 2000
    assert not any(item.key == "otel.metric.overflow" for point in points for item in point.attributes)
    assert found.points("moe.telemetry.series.dropped")[0].as_int == 560
    (line,) = [record.getMessage() for record in caplog.records]
    assert "560 series of moe.expert.assignments are left out" in line
    assert "aggregation_cardinality_limit" in line
    exporter.close()


def test_a_view_of_the_program_lifts_the_limit() -> None:
    program = Program(View(instrument_name="moe.expert.assignments", aggregation_cardinality_limit=20_000))
    snapshot = make_snapshot(num_layers=10, num_experts=256, per_expert=True)
    exporter = OtelExporter(meter_provider=program.provider, cardinality_limit=20_000)
    exporter.export(snapshot)
    found = program.collect()
    assert len(found.points("moe.expert.assignments")) == 2560
    assert found.points("moe.telemetry.series.dropped")[0].as_int == 0
    exporter.close()


def test_the_programs_own_pipeline_sends_the_last_snapshot_when_it_shuts_down() -> None:
    with receiver("http/protobuf") as (received, url):
        sender = OTLPMetricExporter(endpoint=f"{url}/v1/metrics", timeout=5)
        reader = PeriodicExportingMetricReader(sender, export_interval_millis=60_000)
        provider = MeterProvider([reader], shutdown_on_exit=False)
        exporter = OtelExporter(meter_provider=provider)
        exporter.export(with_tokens(1, 10))
        exporter.close()
        provider.shutdown()
    assert [point.as_int for point in received.points(TOKENS)] == [10]

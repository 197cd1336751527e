"""OtelExporter: receivers that are away, slow, busy or broken cost time that is bounded, and no count."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceResponse,
)

from moe_telemetry import ExporterError, Snapshot
from moe_telemetry.delivery import Delivery
from moe_telemetry.records import Health
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.otel import OtelExporter
from tests.exporters.otel.snapshots import TOKENS, expected_series, with_tokens
from tests.stack.otlp_receivers import Received, receiver
from tests.stack.processes import free_port

Sink = tuple[Received, str]

# a receiver answers within milliseconds; what hangs does so for longer than this
SHORT = 0.6
FAULTS = {
    "closing": "close",
    "slow": "hang",
    "too many requests": (429, {"Retry-After": "30"}),
    "broken": (500, {}),
    "redirecting": (302, {"Location": "http://127.0.0.1:9/"}),
}


def _exporter(sink: Sink, protocol: str, **settings: object) -> OtelExporter:
    return OtelExporter(endpoint=sink[1], protocol=protocol, timeout_seconds=SHORT, **settings)  # type: ignore[arg-type]


def _last(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, health=Health(routers_expected=1, routers_observed=1, run_finished=True))


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_export_that_fails_raises_and_the_next_one_loses_nothing(
    sink: Sink, protocol: str, fault: str, temporality: str
) -> None:
    received, _ = sink
    exporter = _exporter(sink, protocol, temporality=temporality)
    exporter.export(with_tokens(1, 10))
    received.answers.extend([FAULTS[fault]] * 9)
    with pytest.raises(ExporterError, match="did not take the metrics"):
        exporter.export(with_tokens(2, 30))
    received.answers.clear()
    exporter.export(with_tokens(3, 60))
    exporter.close()
    expected = [10, 60] if temporality == "cumulative" else [10, 50]
    assert [point.as_int for point in received.points(TOKENS)] == expected
    assert received.values() == expected_series(with_tokens(3, 60))


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_of_several_requests_those_that_failed_come_again_and_the_others_do_not(
    sink: Sink, protocol: str, temporality: str
) -> None:
    received, _ = sink
    first, second = (make_snapshot(step=step, num_layers=16, num_experts=64, per_expert=True) for step in (10, 20))
    exporter = _exporter(sink, protocol, temporality=temporality, max_request_bytes=60_000)
    received.answers.extend([None, (500, {}), None, (500, {})])
    with pytest.raises(ExporterError, match="requests"):
        exporter.export(first)
    assert 2 <= len(received.requests) < received.num_asked
    exporter.export(second)
    exporter.close()
    assert received.values() == expected_series(second)


def test_a_receiver_that_is_busy_for_a_moment_is_asked_again(sink: Sink, protocol: str) -> None:
    received, url = sink
    received.answers.append((429, {"Retry-After": "0"}))
    exporter = OtelExporter(endpoint=url, protocol=protocol, timeout_seconds=10)
    exporter.export(make_snapshot())
    exporter.close()
    assert received.values() == expected_series(make_snapshot())
    assert received.num_asked == 2


def test_the_error_says_who_failed_and_why(sink: Sink, protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    received, url = sink
    received.answers.extend([(429, {"Retry-After": "30"})] * 3)
    exporter = _exporter(sink, protocol)
    with pytest.raises(ExporterError, match=rf"{url} \({protocol}\) did not take the metrics: .*no room"):
        exporter.export(make_snapshot())
    exporter.close()
    # it is said once, by who counts and limits it
    assert not caplog.records


def test_an_error_quotes_no_metric_in_whole(sink: Sink, protocol: str) -> None:
    exporter = _exporter(sink, protocol)
    with pytest.raises(ExporterError, match=r"Metric\(name=") as error:
        exporter.export(make_snapshot(step=2**70, num_layers=61))  # more than a point can hold
    exporter.close()
    assert len(str(error.value)) < 1000


def test_no_message_has_a_header_or_the_path_of_the_endpoint(protocol: str) -> None:
    url = f"http://127.0.0.1:{free_port()}/tenant/s3cret-path"
    headers = {"authorization": "Bearer s3cret\n"}  # a line end, which neither protocol takes
    for settings in ({"headers": headers}, {}):
        exporter = OtelExporter(endpoint=url, protocol=protocol, timeout_seconds=SHORT, **settings)  # type: ignore[arg-type]
        with pytest.raises(ExporterError) as error:
            exporter.export(make_snapshot())
        exporter.close()
        assert "s3cret" not in str(error.value)
        assert error.value.__cause__ is None
        assert error.value.__suppress_context__ or error.value.__context__ is None


def test_points_that_a_receiver_refuses_for_good_are_an_error_and_not_sent_again() -> None:
    with receiver("http/protobuf") as (received, url):
        partial = ExportMetricsPartialSuccess(rejected_data_points=3, error_message="out of order")
        received.answers.append(ExportMetricsServiceResponse(partial_success=partial))
        exporter = OtelExporter(endpoint=url, temporality="delta")
        with pytest.raises(ExporterError, match="3 points refused: out of order"):
            exporter.export(with_tokens(1, 10))
        exporter.export(with_tokens(2, 30))
        exporter.close()
    assert [point.as_int for point in received.points(TOKENS)] == [10, 20]


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_a_receiver_that_comes_late_gets_all_that_was_counted(protocol: str, temporality: str) -> None:
    port = free_port()
    exporter = OtelExporter(
        endpoint=f"http://127.0.0.1:{port}", protocol=protocol, temporality=temporality, timeout_seconds=SHORT
    )
    with pytest.raises(ExporterError, match="did not take the metrics"):
        exporter.export(with_tokens(1, 10))
    with receiver(protocol, port) as (received, _):
        exporter.export(with_tokens(2, 30))
        exporter.close()
    assert received.values() == expected_series(with_tokens(2, 30))


def test_a_receiver_that_restarts_is_found_again(protocol: str) -> None:
    port = free_port()
    exporter = OtelExporter(endpoint=f"http://127.0.0.1:{port}", protocol=protocol, timeout_seconds=5)
    for step in (1, 2):
        with receiver(protocol, port) as (received, _):
            exporter.export(with_tokens(step, step * 10))
        assert [point.as_int for point in received.points(TOKENS)] == [step * 10]
    exporter.close()


def test_a_receiver_that_keeps_failing_is_left_alone_but_for_the_last_snapshot(sink: Sink, protocol: str) -> None:
    received, url = sink
    exporter = OtelExporter(endpoint=url, protocol=protocol, timeout_seconds=30)
    received.answers.extend([(500, {})] * 2)
    for step in (1, 2):
        with pytest.raises(ExporterError, match="no room"):
            exporter.export(with_tokens(step, step * 10))
    with pytest.raises(ExporterError, match="failed 2 times in a row, so this snapshot is not sent"):
        exporter.export(with_tokens(3, 30))
    assert received.num_asked == 2
    exporter.export(_last(with_tokens(4, 40)))
    exporter.close()
    assert [point.as_int for point in received.points(TOKENS)] == [40]


def test_failures_are_counted_and_logged_by_the_delivery_and_training_goes_on(
    sink: Sink, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    received, _ = sink
    received.answers.extend([(500, {})] * 2)
    delivery = Delivery([("otel", _exporter(sink, protocol))])
    for step in (1, 2):
        delivery.put(with_tokens(step, step * 10))
    delivery.put(_last(with_tokens(3, 30)))
    delivery.close(30)
    assert delivery.errors == {"otel": 2}
    assert [point.as_int for point in received.points(TOKENS)] == [30]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "exporter otel failed to export" in line

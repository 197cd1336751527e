"""OtelExporter: who it says it is, and where it sends to, by settings and by standard variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from moe_telemetry import ConfigError, ExporterError
from moe_telemetry.plugins import exporter_scope, resolve_exporter
from moe_telemetry.records import Health
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.otel import OtelExporter
from tests.exporters.otel.snapshots import TOKENS, expected_series, with_tokens
from tests.stack.otlp_receivers import CUMULATIVE, DELTA, PROTOCOLS, Received

# who sends


def test_the_resource_names_service_run_host_and_instance(export: Callable[..., Received]) -> None:
    (resource,) = export(make_snapshot(run="r7")).resources()
    assert (resource["service.name"], resource["run"]) == ("moe-telemetry", "r7")
    assert resource["host.name"]
    assert resource["service.instance.id"].startswith(f"r7:{resource['host.name']}:{os.getpid()}:")


def test_another_run_is_another_instance_that_counts_from_zero(export: Callable[..., Received]) -> None:
    received = export(with_tokens(1, 60), replace(with_tokens(2, 5), run="run-2"))
    assert len({resource["service.instance.id"] for resource in received.resources()}) == 2
    assert [point.as_int for point in received.points(TOKENS)] == [60, 5]


def test_standard_variables_name_the_service_and_add_attributes(
    export: Callable[..., Received], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pretraining")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "cluster=a,host.name=node-7")
    (resource,) = export(make_snapshot()).resources()
    assert (resource["service.name"], resource["cluster"], resource["host.name"]) == ("pretraining", "a", "node-7")


def test_a_service_name_that_is_given_goes_before_the_variable(
    export: Callable[..., Received], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pretraining")
    (resource,) = export(make_snapshot(), service_name="mine").resources()
    assert resource["service.name"] == "mine"


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_a_forked_process_is_another_instance_and_sends_only_what_it_counted(
    sink: tuple[Received, str], protocol: str, temporality: str
) -> None:
    # in a process of its own: gRPC and forks do not mix in one that runs a server, as this one does
    received, url = sink
    code = (
        "import os, sys\n"
        "from dataclasses import replace\n"
        "from moe_telemetry.testing import make_snapshot\n"
        "from moe_telemetry_exporters.otel import OtelExporter\n"
        f"exporter = OtelExporter(endpoint={url!r}, protocol={protocol!r}, temporality={temporality!r})\n"
        "exporter.export(make_snapshot(step=10, num_layers=1))\n"
        "child = os.fork()\n"
        "exporter.export(make_snapshot(step=13 if child else 11, num_layers=1))\n"
        "if not child: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    if protocol == "grpc":
        code = "import os; os.environ['GRPC_ENABLE_FORK_SUPPORT'] = '1'\n" + code
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
    instances: dict[str, list[int]] = {}
    for request in received.requests:
        (resource,) = request.resource_metrics
        (name,) = (
            item.value.string_value for item in resource.resource.attributes if item.key == "service.instance.id"
        )
        one = Received()
        one.requests = [request]
        instances.setdefault(name, []).extend(point.as_int // 256 for point in one.points(TOKENS))
    assert sorted(instances.values()) == ([[1], [10, 13]] if temporality == "cumulative" else [[1], [10, 3]])


def test_each_node_may_export_its_share(export: Callable[..., Received]) -> None:
    received = export(make_snapshot(num_layers=1, node=0, num_nodes=2), scope="node")
    assert received.points(TOKENS)[0].as_int == 1280
    assert exporter_scope(OtelExporter()) == "job"
    assert exporter_scope(OtelExporter(scope="node")) == "node"


# settings


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "MOE_TELEMETRY_OTEL_ENDPOINT"])
def test_the_receiver_can_come_from_the_environment(
    sink: tuple[Received, str], protocol: str, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    received, url = sink
    monkeypatch.setenv(variable, url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=from-variable")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    _, exporter = resolve_exporter("otel")
    exporter.export(make_snapshot())
    exporter.close()
    assert received.values() == expected_series(make_snapshot())
    assert received.headers[0]["api-key"] == "from-variable"
    kinds = {one.sum.aggregation_temporality for one in received.metrics() if one.WhichOneof("data") == "sum"}
    assert kinds == {DELTA}


def test_headers_are_sent_and_never_shown(export: Callable[..., Received]) -> None:
    received = export(make_snapshot(), headers={"Authorization": "Bearer secret"})
    assert received.headers[0]["authorization"] == "Bearer secret"
    assert "secret" not in repr(OtelExporter(headers={"a": "secret"}, endpoint="http://host/secret"))


def test_the_sums_are_cumulative_unless_told_otherwise(export: Callable[..., Received]) -> None:
    received = export(make_snapshot())
    assert {one.sum.aggregation_temporality for one in received.metrics() if one.WhichOneof("data") == "sum"} == {
        CUMULATIVE
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoint": "collector:4317"}, r"endpoint='collector:4317': expected a URL"),
        ({"endpoint": "http://host:port"}, r"endpoint='http://host:port': expected a URL"),
        ({"protocol": "http/json"}, r"protocol='http/json': expected 'grpc' or 'http/protobuf'"),
        ({"temporality": "Delta"}, r"temporality='Delta': expected one of cumulative, delta"),
        ({"timeout_seconds": 0}, r"timeout_seconds=0: expected seconds above 0"),
        ({"max_request_bytes": 10}, r"max_request_bytes=10: expected 10000 or more"),
        ({"scope": "rank"}, r"scope='rank': expected 'job' or 'node'"),
        ({"cardinality_limit": 0}, r"cardinality_limit=0: expected a whole number"),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_made(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OtelExporter(**settings)  # type: ignore[arg-type]


def test_headers_of_the_environment_that_cannot_be_read_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TELEMETRY_OTEL_HEADERS", "Bearer hunter2")
    with pytest.raises(ConfigError, match=r"OTEL_HEADERS=\(not shown\): expected key=value") as error:
        resolve_exporter("otel")
    assert error.value.__cause__ is None


@pytest.mark.parametrize("endpoint", ["http://me:hunter2@host:4318", "me:hunter2@host:4318", "me:hunter2@[::1/"])
def test_a_password_in_the_endpoint_is_refused_and_not_repeated(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="give it as a header") as error:
        OtelExporter(endpoint=endpoint)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "endpoint", ["htp://host/hunter2", "host:4318/hunter2", "http://[::1?key=hunter2", "http://?hunter2"]
)
def test_a_path_or_a_query_which_may_be_a_key_is_not_repeated(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL") as error:
        OtelExporter(endpoint=endpoint)
    assert "hunter2" not in str(error.value)


def test_port_4317_speaks_grpc_unless_told_otherwise() -> None:
    def protocol_of(**settings: str) -> str:
        return OtelExporter(**settings)._target().protocol  # type: ignore[arg-type]

    assert protocol_of(endpoint="http://host:4317") == "grpc"
    assert protocol_of(endpoint="http://host:4317", protocol="http/protobuf") == "http/protobuf"
    assert protocol_of(endpoint="https://host/otlp") == "http/protobuf"
    assert protocol_of() == "http/protobuf"


@pytest.mark.parametrize("package", ["grpc", "http"])
def test_the_package_of_one_protocol_is_enough(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    missing, present = sorted(PROTOCOLS, key=lambda name: not name.startswith(package))
    for name in [name for name in sys.modules if name.startswith(f"opentelemetry.exporter.otlp.proto.{package}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{package}", None)
    with pytest.raises(ExporterError, match=rf"otlp-proto-{package}: pip install 'moe-telemetry\[otel\]'"):
        OtelExporter(protocol=missing)
    OtelExporter(protocol=present)


def test_a_missing_sdk_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("moe_telemetry_exporters.otel", "opentelemetry.sdk"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(ExporterError, match=r"needs the package 'opentelemetry.*pip install 'moe-telemetry\[otel\]'"):
        resolve_exporter("otel")


@pytest.mark.parametrize("unused", ["grpc", "requests"])
def test_only_the_protocol_that_is_used_is_imported_and_never_torch(unused: str) -> None:
    used = "http/protobuf" if unused == "grpc" else "grpc"
    code = (
        f"import sys\nfrom moe_telemetry_exporters.otel import OtelExporter\nOtelExporter(protocol={used!r})\n"
        f"print(sorted({{'torch', {unused!r}}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_finished_run_says_so(export: Callable[..., Received]) -> None:
    health = Health(routers_expected=3, routers_observed=3, run_finished=True)
    (point,) = export(replace(make_snapshot(), health=health)).points("moe.telemetry.run.finished")
    assert point.as_double == 1

"""Exporters by name: found by entry point, set up from the environment, and errors that say what to do."""

from __future__ import annotations

import logging
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from moe_telemetry import ConfigError, ExporterError, plugins
from moe_telemetry.plugins import exporter_scope, load_adapters, resolve_exporter, warn_of_misspelt_variables
from moe_telemetry.testing import RecordingExporter
from moe_telemetry_exporters.jsonl import JsonlExporter
from moe_telemetry_exporters.prometheus import PrometheusExporter


class NodeExporter(RecordingExporter):
    scope = "node"


def _install(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    entry = EntryPoint(name=name, value=value, group="moe_telemetry.exporters")
    monkeypatch.setattr(plugins, "entry_points", lambda **_: [entry])


@pytest.mark.parametrize("name", ["console", "jsonl", "otel", "prometheus", "tensorboard"])
def test_an_exporter_of_this_package_is_found_by_name(name: str) -> None:
    found, exporter = resolve_exporter(name)
    assert found == name
    assert type(exporter).__module__.startswith(f"moe_telemetry_exporters.{name}")


def test_an_exporter_takes_its_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TELEMETRY_PROMETHEUS_PORT", "1234")
    monkeypatch.setenv("MOE_TELEMETRY_PROMETHEUS_ADDRESS", "0.0.0.0")
    monkeypatch.setenv("MOE_TELEMETRY_JSONL_PATH", "here.jsonl")
    _, prometheus = resolve_exporter("prometheus")
    _, jsonl = resolve_exporter("jsonl")
    assert isinstance(prometheus, PrometheusExporter)
    assert (prometheus.port, prometheus.address) == (1234, "0.0.0.0")
    assert isinstance(jsonl, JsonlExporter)
    assert jsonl.path == "here.jsonl"


@pytest.mark.parametrize("text", ["http", "70000"])
def test_a_wrong_setting_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MOE_TELEMETRY_PROMETHEUS_PORT", text)
    with pytest.raises(ConfigError, match=rf"(?i)port.*{text}"):
        resolve_exporter("prometheus")


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        ExporterError, match="no exporter named 'promtheus'; installed: console, jsonl, otel, prometheus"
    ):
        resolve_exporter("promtheus")


@pytest.mark.parametrize(("name", "package"), [("prometheus", "prometheus_client"), ("tensorboard", "tensorboard")])
def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    for module in list(sys.modules):
        if module.startswith((package, f"moe_telemetry_exporters.{name}")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # importing it now fails as if it were not installed
    with pytest.raises(ExporterError, match=rf"needs the package '{package}.*: pip install 'moe-telemetry\[{name}\]'"):
        resolve_exporter(name)


def test_every_exporter_that_can_lack_a_package_has_an_extra_of_its_name() -> None:
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8")
    table = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, flags=re.MULTILINE))
    of_ours = {entry.name for entry in entry_points(group="moe_telemetry.exporters")}
    assert of_ours - {"console", "jsonl"} <= extras


def test_what_an_exporter_of_another_package_lacks_is_named_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "my_sinks-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-sinks\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[moe_telemetry.exporters]\nmine = my_sinks_lib:Sink\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExporterError, match="needs the package 'my_sinks_lib': pip install my_sinks_lib"):
        resolve_exporter("mine")


def test_an_exporter_of_another_package_is_found_and_need_not_be_a_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "my-sink", "moe_telemetry.testing.exporters:RecordingExporter")
    name, exporter = resolve_exporter("my-sink")
    assert name == "my-sink"
    assert isinstance(exporter, RecordingExporter)


def test_a_dash_in_a_name_is_an_underscore_in_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "my-sink", "moe_telemetry_exporters.jsonl:JsonlExporter")
    monkeypatch.setenv("MOE_TELEMETRY_MY_SINK_PATH", "there")
    _, exporter = resolve_exporter("my-sink")
    assert isinstance(exporter, JsonlExporter)
    assert exporter.path == "there"


def test_an_object_is_taken_as_it_is_and_named_by_its_class() -> None:
    exporter = RecordingExporter()
    assert resolve_exporter(exporter) == ("RecordingExporter", exporter)


@pytest.mark.parametrize("value", [object(), 3, RecordingExporter], ids=["object", "number", "class"])
def test_what_is_no_exporter_is_refused(value: object) -> None:
    with pytest.raises(ExporterError, match=r"is no exporter: expected a name, or an object with export\(\)"):
        resolve_exporter(value)  # type: ignore[arg-type]


def test_an_exporter_is_used_once_a_job_unless_it_says_once_a_node() -> None:
    assert exporter_scope(RecordingExporter()) == "job"
    assert exporter_scope(NodeExporter()) == "node"


def test_adapters_are_callable() -> None:
    adapters = load_adapters()
    assert adapters
    assert all(callable(adapter) for adapter in adapters)


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("MOE_TELEMETRY_EVERY_N_STEP", "; did you mean MOE_TELEMETRY_EVERY_N_STEPS?"),
        ("MOE_TELEMETRY_PROMETHEUS_PROT", "; did you mean MOE_TELEMETRY_PROMETHEUS_PORT?"),
        ("MOE_TELEMETRY_XYZ", ""),
    ],
)
def test_a_variable_that_nobody_reads_is_reported(variable: str, hint: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moe_telemetry"):
        warn_of_misspelt_variables(["prometheus"], {variable: "1", "MOE_TELEMETRY_RUN": "a"})
    assert caplog.messages == [f"moe_telemetry: the variable {variable} is no setting and changes nothing{hint}"]


def test_settings_of_an_exporter_that_is_not_used_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_misspelt_variables(["console", RecordingExporter()], {"MOE_TELEMETRY_PROMETHEUS_PORT": "1"})
    assert caplog.messages == []

"""Assert what holds of the installed wheel; run by scripts/check_wheel.py in the wheel's environment."""

from __future__ import annotations

import sys
from importlib.metadata import distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from packaging.requirements import Requirement

import moe_telemetry
from moe_telemetry import cli
from moe_telemetry_exporters.prometheus import PrometheusExporter

__all__ = ["main"]

PACKAGES = ("moe_telemetry", "moe_telemetry_exporters")


def main() -> None:
    """Check files, metadata, entry points and package data."""
    _check_files()
    _check_metadata()
    _check_exporters()
    _check_adapters()
    _check_rules()
    _check_dashboards()
    _check_live_page()


def _check_files() -> None:
    for package in PACKAGES:
        spec = find_spec(package)
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
        assert len(folders) == 1, f"{package} is in {folders}"
        assert folders[0].is_relative_to(sys.prefix), f"{package} comes from {folders[0]}, not from the wheel"
        assert (folders[0] / "py.typed").is_file(), f"{package} has no py.typed"


def _check_metadata() -> None:
    about = distribution("moe-telemetry")
    assert about.version == moe_telemetry.__version__
    assert about.metadata["Requires-Python"] == ">=3.10"
    assert about.metadata["License-Expression"] == "Apache-2.0"
    assert any(str(path).endswith("licenses/LICENSE") for path in about.files or ()), "no LICENSE in the wheel"
    requirements = [Requirement(text) for text in about.requires or ()]
    (torch,) = [each for each in requirements if each.name == "torch"]
    # a cap would keep users from the torch that their machine needs
    assert {each.operator for each in torch.specifier} == {">="}, torch


def _check_exporters() -> None:
    exporters = _ours("moe_telemetry.exporters")
    assert exporters.keys() >= {"console", "jsonl", "prometheus", "tensorboard"}, exporters
    for name, exporter in exporters.items():
        assert all(callable(getattr(exporter, method)) for method in ("export", "close")), name
    assert "torch" not in sys.modules, "an exporter imports torch"


def _check_adapters() -> None:
    assert "transformers" in _ours("moe_telemetry.adapters")


def _check_rules() -> None:
    with TemporaryDirectory() as folder:
        assert cli.main(["rules", "--out", folder]) == 0
        written = {path.name for path in Path(folder).rglob("*.*")}
        assert written >= {"moe-recording.yaml", "moe-replay.yaml", "routing.yml", "runbook.md"}, written


def _check_dashboards() -> None:
    with TemporaryDirectory() as folder:
        assert cli.main(["dashboards", "--out", folder, "--alerts"]) == 0
        written = {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.*") if path.is_file()}
        assert len([name for name in written if name.startswith("dashboards/moe-")]) == 5, written
        assert "provisioning/alerting/moe-telemetry.yaml" in written, written


def _check_live_page() -> None:
    exporter = PrometheusExporter(port=0)
    exporter.start()
    try:
        with urlopen(str(exporter.url).replace("/metrics", "/"), timeout=30) as response:  # noqa: S310  # our own
            assert b'<canvas id="heatmap"' in response.read(), "no live page in the wheel"
    finally:
        exporter.close()


def _ours(group: str) -> dict[str, object]:
    ours = {entry.name: entry for entry in distribution("moe-telemetry").entry_points if entry.group == group}
    assert ours.keys() <= {entry.name for entry in entry_points(group=group)}
    return {name: entry.load() for name, entry in ours.items()}


if __name__ == "__main__":
    main()

"""The house itself: public names, import without torch, supported Pythons, generated files, examples."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import moe_telemetry as mt
from moe_telemetry.catalog import METRICS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {"moe_telemetry": ROOT, "moe_telemetry_exporters": ROOT / "exporters"}
MODULES = {
    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
    for package, base in PACKAGES.items()
    for path in sorted((base / package).rglob("*.py"))
}
SOURCES = [
    path
    for folder in ("moe_telemetry", "exporters", "grafana", "tests", "scripts", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "node_modules" not in path.parts
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OLDEST, NEWEST = (3, 10), (3, 13)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def _id(value: object) -> str | None:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


def test_the_public_names_are_these() -> None:
    assert set(mt.__all__) == {
        "METRICS",
        "ROUTER_DIAGNOSTIC_CHANNEL_COUNT",
        "ConfigError",
        "Counts",
        "Exporter",
        "ExporterError",
        "Health",
        "LayerSnapshot",
        "LifecycleError",
        "MaskError",
        "Metric",
        "Misalignment",
        "Monitor",
        "NoRouterFoundError",
        "ReductionError",
        "RouteComparison",
        "RouterDiagnosticChannel",
        "RouterKey",
        "RouterKeyError",
        "RouterOutput",
        "RouterSpec",
        "Routes",
        "RoutesError",
        "Sample",
        "Snapshot",
        "SnapshotError",
        "TelemetryConfig",
        "TelemetryError",
        "TraceError",
        "__version__",
        "build_router_diagnostics",
        "compare_routes",
        "locate_misalignment",
        "watch",
    }


def test_every_public_name_is_there_and_no_other() -> None:
    assert {name for name in mt.__all__ if getattr(mt, name) is not None} == set(mt.__all__)
    assert set(mt.__all__) <= set(dir(mt))
    with pytest.raises(AttributeError, match="has no attribute 'wacth'"):
        _ = mt.wacth  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in mt.__all__ if name[0].isalpha() and not name.isupper()])
def test_every_public_name_says_what_it_is(name: str) -> None:
    public = getattr(mt, name)
    members = [
        (member, value)
        for member, value in vars(public).items()
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, (classmethod, property)))
    ]
    # a dataclass without a docstring gets its signature for one
    assert public.__doc__
    assert not public.__doc__.startswith(f"{name}(")
    assert [member for member, value in members if not value.__doc__] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_declares_its_names(name: str) -> None:
    # their order is the linter's business (RUF022)
    declared = import_module(name).__all__
    assert len(declared) == len(set(declared))
    assert [each for each in declared if not hasattr(import_module(name), each)] == []


def test_importing_the_package_loads_no_torch() -> None:
    script = (
        "import sys, moe_telemetry as mt; mt.TelemetryConfig(), mt.METRICS, mt.Snapshot; print('torch' in sys.modules)"
    )
    assert _run("-c", script).stdout == "False\n"


def test_the_command_line_shows_its_help_without_torch() -> None:
    script = """
import sys
from moe_telemetry.cli import main
try:
    main(["--help"])
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    assert _run("-c", script).stdout.splitlines()[-1] == "0 False"


def test_modules_that_need_no_torch_import_where_there_is_none() -> None:
    contracts = {contract["name"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
    torch_free = contracts["These modules need no torch"]["source_modules"]
    names = [name for name in MODULES if any(name == each or name.startswith(f"{each}.") for each in torch_free)]
    assert len(names) >= len(torch_free)
    script = f"import sys, importlib; sys.modules['torch'] = None; [importlib.import_module(n) for n in {names}]"
    assert _run("-c", script).stderr == ""


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_every_source_file_is_python_3_10(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=OLDEST)


def test_the_metadata_the_linter_and_mypy_speak_of_the_same_pythons() -> None:
    project, oldest = PROJECT["project"], ".".join(map(str, OLDEST))
    listed = [f"Programming Language :: Python :: 3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    assert [each for each in project["classifiers"] if re.search(r":: 3\.\d", each)] == listed
    assert project["requires-python"] == f">={oldest}"
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


def test_the_version_of_torch_that_setup_installs_is_one_that_users_may_have() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert "torch>=2.6" in PROJECT["project"]["dependencies"]
    assert pins["torch"] == "2.13.0"


def test_the_page_of_metrics_is_up_to_date_and_names_every_metric() -> None:
    result = _run("scripts/generate_docs.py", "--check")
    assert (result.returncode, result.stderr) == (0, "")
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in METRICS if f"### `{name}`\n" not in page] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=_id)
def test_links_between_pages_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=_id)
def test_every_example_runs(path: Path) -> None:
    result = _run(str(path))
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("name", MODULES)
def test_no_signature_shows_the_environment(name: str) -> None:
    # help() prints default values, and the environment may hold passwords
    functions = [value for _, value in inspect.getmembers(import_module(name), inspect.isfunction)]
    for _, owner in inspect.getmembers(import_module(name), inspect.isclass):
        functions += [getattr(value, "__func__", value) for value in vars(owner).values()]
    defaults = [each.__defaults__ or () for each in functions if inspect.isfunction(each)]
    assert not any(value is os.environ for values in defaults for value in values)

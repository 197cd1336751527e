"""The dashboards' JSON in the types that Grafana publishes, checked by the TypeScript compiler."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.grafana.dashboard_files import DASHBOARDS, FOLDER

CHECKER = FOLDER / "typecheck"
COMPILER = CHECKER / "node_modules" / ".bin" / "tsc"


@pytest.fixture(autouse=True)
def _compiler() -> None:
    """Skip where npm's packages are missing; in CI, fail."""
    if not COMPILER.exists():
        (pytest.fail if "CI" in os.environ else pytest.skip)("needs npm's packages in grafana/typecheck: make setup")


def _errors(folder: Path, dashboards: dict[str, str]) -> list[str]:
    """Return what the compiler says of dashboards, by name, each as a literal of the type of all of them."""
    for name, text in dashboards.items():
        head = (
            f"import type {{ DashboardJson }} from '{CHECKER / 'dashboard'}';\nexport const dashboard: DashboardJson = "
        )
        (folder / f"{name}.ts").write_text(head + text, encoding="utf-8")
    files = [str(folder / f"{name}.ts") for name in dashboards]
    (folder / "tsconfig.json").write_text(json.dumps({"extends": str(CHECKER / "tsconfig.json"), "files": files}))
    command = [COMPILER, "--project", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_every_dashboard_is_of_the_type_of_grafanas_dashboards(tmp_path: Path) -> None:
    assert _errors(tmp_path, {name: json.dumps(dashboard, indent=1) for name, dashboard in DASHBOARDS.items()}) == []


def test_the_compiler_notices_what_is_wrong(tmp_path: Path) -> None:
    text = json.dumps(DASHBOARDS["moe-overview"], indent=1)
    wrong = {
        "word": ('"placement": "right"', '"placement": "middle"'),
        "kind": ('"type": "timeseries"', '"type": "timeline"'),
        "number": ('"refresh": 2', '"refresh": 7'),
        "surplus": ('"cellHeight": "sm"', '"cellHeight": "sm", "footer": {}'),
        "missing": ('"title": "Step"', '"tittle": "Step"'),
        "query": ('"editorMode": "code"', '"editorMode": "magic"'),
    }
    assert [old for old, _ in wrong.values() if old not in text] == []
    found = _errors(tmp_path, {name: text.replace(old, new) for name, (old, new) in wrong.items()})
    assert {name for name in wrong if any(f"{name}.ts(" in line for line in found)} == wrong.keys()

"""`moe-telemetry wandb-workspace`: the workspace as W&B would get it, and one line where it cannot be made."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_telemetry.charts import FIRST_LOOK
from moe_telemetry.cli import main
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.scalars import scalars
from moe_telemetry_exporters.wandb.rows import STEP_KEY
from moe_telemetry_exporters.wandb.summary import RunSummary

# wandb-workspaces itself, when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")


@pytest.fixture
def sections(capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, Any]]]:
    assert main(["wandb-workspace", "--dry-run"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["displayName"] == "MoE routers"
    found = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert all(section["isOpen"] for section in found)
    return {section["name"]: section["panels"] for section in found}


def _of_type(panels: list[dict[str, Any]], view_type: str) -> list[dict[str, Any]]:
    return [panel["config"] for panel in panels if panel["viewType"] == view_type]


def test_its_sections_are_the_runs_and_the_first_look(sections: dict[str, list[dict[str, Any]]]) -> None:
    assert list(sections) == ["Runs", *(section.title for section in FIRST_LOOK)]


def test_every_line_plot_is_over_the_training_step_and_finds_keys_that_are_logged(
    sections: dict[str, list[dict[str, Any]]],
) -> None:
    keys = [key for key, _ in scalars(make_snapshot(replayed=True))]
    plots = [plot for panels in sections.values() for plot in _of_type(panels, "Run History Line Plot")]
    assert len(plots) == sum(len(section.charts) for section in FIRST_LOOK)
    for plot in plots:
        assert plot["xAxis"] == STEP_KEY
        assert plot["useMetricRegex"]
        assert [key for key in keys if re.search(plot["metricRegex"], key)]


def test_the_runs_are_compared_by_numbers_that_are_in_their_summary(sections: dict[str, list[dict[str, Any]]]) -> None:
    shown = [metric for chart in _of_type(sections["Runs"], "Scalar Chart") for metric in chart["metrics"]]
    assert len(shown) == 5
    assert set(shown) <= set(RunSummary({}).of(make_snapshot(replayed=True)))


def test_the_load_of_all_experts_is_there_as_a_picture(sections: dict[str, list[dict[str, Any]]]) -> None:
    (picture,) = _of_type(sections["Load"], "Media Browser")
    assert picture["mediaKeys"] == ["moe/expert_relative_load"]


def test_without_a_project_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wandb-workspace", "--project", "p"]) == 2
    assert capsys.readouterr().err.startswith("moe-telemetry: --entity and --project are missing: ")


def test_without_a_login_it_is_one_line_that_says_how_to_log_in(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_telemetry.cli", "wandb-workspace", "--entity", "e", "--project", "p"]
    environment = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "No API key configured" in done.stderr
    assert "wandb login" in done.stderr


def test_without_the_package_it_names_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    assert main(["wandb-workspace", "--dry-run"]) == 2
    assert "pip install 'moe-telemetry[wandb]'" in capsys.readouterr().err

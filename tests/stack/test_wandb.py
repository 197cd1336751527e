"""W&B under a real monitor: one run for a job of two ranks, and training that goes on without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_telemetry.testing import run_ranks
from tests.exporters.wandb_files import read_run, run_folders
from tests.stack import wandb_worker
from tests.stack.processes import child_environment, free_port

NUM_RANKS = 2


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("MOE_TELEMETRY_WANDB_DIR", str(tmp_path))


def test_a_job_of_two_ranks_is_one_run_with_the_tokens_of_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    results = run_ranks(wandb_worker.train, NUM_RANKS)
    assert results == [{"wandb": 0}, {}]
    assert len(run_folders(tmp_path)) == 1
    rows = read_run(tmp_path).rows_with("moe/router_tokens/decoder.0")
    assert [row["moe/step"] for row in rows] == [1, 2, 3, 4]
    assert [row["moe/router_tokens/decoder.0"] for row in rows] == [
        step * NUM_RANKS * wandb_worker.TOKENS_A_STEP for step in range(1, 5)
    ]


def test_without_a_network_training_goes_on_and_failures_are_counted(tmp_path: Path) -> None:
    code = "import json\nfrom tests.stack.wandb_worker import train\nprint(json.dumps(train(0)))\n"
    environment = {
        **child_environment(),
        "WANDB_API_KEY": "0" * 40,
        "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}",
        "MOE_TELEMETRY_WANDB_INIT_TIMEOUT_SECONDS": "1",
        "MOE_TELEMETRY_WANDB_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["wandb"] >= 1
    assert "moe_telemetry: exporter wandb " in done.stderr

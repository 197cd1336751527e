"""What W&B wrote of a run, read back with its own reader."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.util import get_core_path


@dataclass
class RunFile:
    """The records of one run's transaction log."""

    folder: Path
    run: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    is_finished: bool = False

    def rows_with(self, key: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if key in row]


def run_folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/*run-*"))


def read_run(folder: Path) -> RunFile:
    """Read the only run below a folder, once it is finished: the log is complete some moments after finish()."""
    (found,) = run_folders(folder)
    deadline = time.monotonic() + 60
    while not (run := _read(found)).is_finished:
        assert time.monotonic() < deadline, f"{found} does not end"
        time.sleep(0.1)
    return run


def _read(folder: Path) -> RunFile:
    (log,) = folder.glob("*.wandb")
    # what `wandb leet inspect --json` runs
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", "--run-file", str(log), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    run = RunFile(folder)
    for line in done.stdout.splitlines():
        _add(run, json.loads(line))
    return run


def _add(run: RunFile, record: dict[str, Any]) -> None:
    content = record.get(record["type"], {})
    match record["type"]:
        case "run":
            run.run = content
        case "history":
            run.rows.append(content["item"])
        case "summary":
            run.summary.update(content.get("update", {}))
        case "config":
            run.config.update(content.get("update", {}))
        case "metric":
            run.metrics.append(content)
        case "alert":
            run.alerts.append(content)
        case "exit":
            run.is_finished = True

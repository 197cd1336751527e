"""What holds for every test: its own environment, no monitor left open, servers required in CI."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# tensors of tests are tiny: a second thread only makes the ranks of one machine wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a busy machine is slow, not wrong; CI repeats the same examples, so that its result is the commit's
settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("house")

SERVERS = ("prometheus", "promtool")
# ids that launchers give to a run, and their ranks
LAUNCHER_VARIABLES = ("WANDB_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take away the settings of the shell, and close what a failed test left open."""
    for variable in (*os.environ,):
        if variable.startswith("MOE_TELEMETRY_") or variable in LAUNCHER_VARIABLES:
            monkeypatch.delenv(variable)
    yield
    # not imported here: a test without torch stays one
    if module := sys.modules.get("moe_telemetry.monitor"):
        for monitor in list(module._open_monitors):
            monitor.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of real servers where these are missing; in CI, fail."""
    missing = [server for server in SERVERS if shutil.which(server) is None]
    if not missing or item.get_closest_marker("stack") is None:
        return
    reason = f"needs {', '.join(missing)}: make setup"
    if "CI" in os.environ:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)

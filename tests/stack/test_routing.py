"""The example of routing: amtool takes it, and a real Alertmanager tells the right receiver, once a cause."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_telemetry.alerts import RULES
from tests.grafana.dashboard_files import FOLDER
from tests.stack.processes import free_port, running, wait_until
from tests.stack.prometheus_server import is_ready

pytestmark = pytest.mark.stack

CONFIG = FOLDER / "alertmanager" / "routing.yml"
RECEIVERS = {"critical": "pager", "warning": "chat", "info": "nobody"}


@pytest.fixture(autouse=True)
def _amtool() -> None:
    if shutil.which("amtool") is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("needs prometheus-alertmanager: make setup")


def _run(*arguments: str | Path) -> str:
    done = subprocess.run(["amtool", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_amtool_takes_the_configuration() -> None:
    assert "SUCCESS" in _run("check-config", CONFIG)


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_alert_goes_where_its_severity_says(name: str) -> None:
    severity = RULES[name].severity
    labels = (f"alertname={name}", f"severity={severity}", "run=r")
    receiver = RECEIVERS[severity]
    _run("config", "routes", "test", f"--config.file={CONFIG}", f"--verify.receivers={receiver}", *labels)


def test_nobody_is_told_of_information() -> None:
    assert "- name: nobody\n" in CONFIG.read_text() + "\n"  # a receiver without any way to be told
    assert not CONFIG.read_text().split("- name: nobody\n")[1].strip()


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("routing")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        "prometheus-alertmanager",
        f"--config.file={CONFIG}",
        f"--storage.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with running(command, folder / "alertmanager.log"):
        wait_until(lambda: is_ready(url), "Alertmanager is ready")
        yield url


def _alert(name: str, run: str, layer: str = "3") -> dict[str, Any]:
    labels = {"alertname": name, "severity": RULES[name].severity, "run": run, "block": "decoder", "layer": layer}
    return {"labels": labels}


def _post(url: str, alerts: list[dict[str, Any]]) -> None:
    request = urllib.request.Request(f"{url}/api/v2/alerts", json.dumps(alerts).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request, timeout=10).close()


def _inhibited(url: str, run: str) -> set[tuple[str, str]]:
    """Return the alerts of a run that are held back, by name and layer."""
    with urllib.request.urlopen(f"{url}/api/v2/alerts", timeout=10) as response:
        alerts = json.load(response)
    return {
        (alert["labels"]["alertname"], alert["labels"]["layer"])
        for alert in alerts
        if alert["labels"]["run"] == run and alert["status"]["inhibitedBy"]
    }


def test_zero_overlap_holds_back_low_agreement_of_the_same_layer_and_of_no_other(alertmanager: str) -> None:
    agreement = "MoeReplayAgreementLow"
    others = [_alert(agreement, "r", "4"), _alert(agreement, "other")]
    _post(alertmanager, [_alert("MoeReplayZeroOverlapHigh", "r"), _alert(agreement, "r"), *others])
    assert wait_until(lambda: _inhibited(alertmanager, "r"), "an alert is held back") == {(agreement, "3")}
    assert _inhibited(alertmanager, "other") == set()


def test_a_collapsed_router_holds_back_what_follows_from_it(alertmanager: str) -> None:
    follow = ("MoeExpertsDead", "MoeLoadImbalanced")
    _post(alertmanager, [_alert(name, "s") for name in ("MoeRouterEntropyCollapsed", *follow)])
    held = {(name, "3") for name in follow}
    assert wait_until(lambda: _inhibited(alertmanager, "s") == held, f"{held} are held back")


def test_a_replay_that_cannot_be_checked_holds_back_what_few_rows_say(alertmanager: str) -> None:
    follow = ("MoeReplayAgreementLow", "MoeReplayZeroOverlapHigh")
    _post(alertmanager, [_alert(name, "t") for name in ("MoeReplayCoverageLow", *follow)])
    held = {(name, "3") for name in follow}
    assert wait_until(lambda: _inhibited(alertmanager, "t") == held, f"{held} are held back")

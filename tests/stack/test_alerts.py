"""From a misaligned replay to the pager: real runs, a real Prometheus, a real Alertmanager, a webhook.

Three runs side by side under the packaged rules: the demo with `--scenario shifted`, the same with `replay`, and a
small model that replays its own routes one row late (`tiny`). The demo's experts are shared by many tokens, so that a
shift shows in the agreement of every layer and only now and then as zero overlap; in the small model it shows in both.
Only times are changed, so that minutes become seconds: the windows of the replay rules are 10 s in place of 10
minutes, their `for` is 3 s, scrapes and evaluations come every second, and the demos begin to replay at step 20 and
not at 50.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from moe_telemetry.cli import main
from moe_telemetry.demo.options import DemoOptions
from tests.stack.alert_servers import Webhook, alerting, webhook_listening
from tests.stack.processes import free_port, processes_with, running, wait_until
from tests.stack.prometheus_server import Prometheus

pytestmark = pytest.mark.stack

ZERO_OVERLAP, AGREEMENT = "MoeReplayZeroOverlapHigh", "MoeReplayAgreementLow"
EXPECTED = {(ZERO_OVERLAP, "tiny"), (AGREEMENT, "tiny"), (AGREEMENT, "shifted")}
LAYERS = {"tiny": {"0", "1"}, "shifted": {"1", "2", "3"}, "healthy": {"1", "2", "3"}}

Times = dict[tuple[str, str, str], float]
"""Seconds until an alert was first seen, by its name, run and state."""


@dataclass(frozen=True)
class Story:
    """What was seen of the three runs, from their first step to the end of those that are misaligned."""

    first_seen: Times
    fired: list[dict[str, Any]]
    """Alerts that reached the webhook."""
    resolved: list[dict[str, Any]]
    alerts_of_healthy: dict[tuple[str, ...], float]
    """Evaluations at which an alert of the healthy run was pending or firing, by name and state."""
    checked: dict[tuple[str, ...], float]
    """Checked tokens by run and layer."""
    agreement: dict[tuple[str, ...], float]
    log: str
    left_over: list[int]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    if shutil.which("prometheus-alertmanager") is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("needs prometheus-alertmanager: make setup")
    folder = tmp_path_factory.mktemp("alerts")
    ports = {run: free_port() for run in LAYERS}
    with ExitStack() as stack:
        webhook = stack.enter_context(webhook_listening())
        server = stack.enter_context(alerting(list(ports.values()), _quick_rules(folder), webhook, folder))
        misaligned = [
            stack.enter_context(_run("tiny", _tiny(ports["tiny"], folder), folder)),
            stack.enter_context(_run("shifted", _demo("shifted", ports["shifted"], folder / "stop"), folder)),
        ]
        stack.enter_context(_run("healthy", _demo("replay", ports["healthy"], folder / "never"), folder))
        told = _tell(server, webhook, misaligned, folder / "stop")
    return Story(**told, log=(folder / "tiny.log").read_text(), left_over=processes_with(str(folder)))


def _quick_rules(folder: Path) -> Path:
    """Write the packaged rules with seconds for minutes in those on replay."""
    rules = folder / "rules"
    assert main(["rules", "--out", str(rules)]) == 0
    replay = rules / "moe-replay.yaml"
    quick = re.sub(r"for: \d+m\n", "for: 3s\n", replay.read_text().replace("[10m]", "[10s]"))
    replay.write_text(quick)
    return rules


def _run(run: str, program: list[str], folder: Path) -> AbstractContextManager[subprocess.Popen[bytes]]:
    rendezvous = ("RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}")
    environment = ["env", f"MOE_TELEMETRY_RUN={run}", "OMP_NUM_THREADS=1", *rendezvous]
    return running([*environment, sys.executable, *program], folder / f"{run}.log")


def _tiny(port: int, folder: Path) -> list[str]:
    return [str(Path(__file__).with_name("replay_worker.py")), str(port), str(folder / "stop")]


def _demo(scenario: Literal["replay", "shifted"], port: int, stop_file: Path) -> list[str]:
    """Return one rank of the demo, which trains until its stop file appears."""
    options = DemoOptions(
        scenario=scenario,
        warm_up_steps=20,
        steps=1_000_000,
        every_n_steps=1,
        evaluate_every_n_steps=1_000_000,
        port=port,
        exporters=("prometheus",),
        stop_file=str(stop_file),
    )
    return ["-m", "moe_telemetry.demo.worker", options.to_json()]


def _tell(
    server: Prometheus, webhook: Webhook, misaligned: list[subprocess.Popen[bytes]], stop_file: Path
) -> dict[str, Any]:
    """Wait until all replay, all alerts have come, and the misaligned runs have ended and their alerts with them."""
    first_seen: Times = {}
    begin = time.monotonic()

    def has_told_all() -> bool:
        for found in server.query("ALERTS", "alertname", "run", "alertstate"):
            first_seen.setdefault(found, time.monotonic() - begin)  # type: ignore[arg-type]
        return webhook.has("firing", EXPECTED) and len(_checked(server)) == sum(map(len, LAYERS.values()))

    wait_until(has_told_all, f"the webhook is told of {EXPECTED}")
    seen = {"checked": _checked(server), "agreement": server.query("moe_replay_agreement_ratio", "run", "layer")}
    stop_file.touch()
    assert [program.wait(30) for program in misaligned] == [0, 0]
    wait_until(lambda: webhook.has("resolved", EXPECTED), "the webhook is told of the end")
    healthy = "count_over_time(ALERTS{run='healthy',alertname=~'MoeReplay.*|MoeTelemetry.*'}[5m])"
    return {
        **seen,
        "first_seen": first_seen,
        "fired": webhook.received("firing"),
        "resolved": webhook.received("resolved"),
        "alerts_of_healthy": server.query(healthy, "alertname", "alertstate"),
    }


def _checked(server: Prometheus) -> dict[tuple[str, ...], float]:
    counted = "sum by (run, layer) (moe_replay_tokens_total{outcome='checked'}) >= 100"
    return server.query(counted, "run", "layer")


def _named(alerts: list[dict[str, Any]], name: str, run: str) -> list[dict[str, Any]]:
    return [alert for alert in alerts if (alert["labels"]["alertname"], alert["labels"]["run"]) == (name, run)]


def test_all_runs_were_checked_in_all_layers(story: Story) -> None:
    assert set(story.checked) == {(run, layer) for run, layers in LAYERS.items() for layer in layers}


@pytest.mark.parametrize(("name", "run"), sorted(EXPECTED))
def test_the_alert_is_pending_before_it_fires(story: Story, name: str, run: str) -> None:
    # 3 s of `for`, less what a query and an evaluation may be apart
    assert story.first_seen[name, run, "firing"] - story.first_seen[name, run, "pending"] >= 1.5


@pytest.mark.parametrize(("name", "run"), sorted(EXPECTED))
def test_the_alert_reaches_the_webhook_with_run_block_and_layer(story: Story, name: str, run: str) -> None:
    labels = [alert["labels"] for alert in _named(story.fired, name, run)]
    assert {each["block"] for each in labels} == {"decoder"}
    assert {each["layer"] for each in labels} <= LAYERS[run]
    assert not any("instance" in each for each in labels)


def test_the_alert_says_in_words_what_is_wrong_and_where_to_read_on(story: Story) -> None:
    alert = _named(story.fired, ZERO_OVERLAP, "tiny")[0]
    told = rf"Run tiny: \d\d.* of the replayed tokens of decoder\.{alert['labels']['layer']} share no expert with .*"
    assert re.fullmatch(told, alert["annotations"]["summary"])
    assert alert["annotations"]["runbook_url"] == "runbook.md#moereplayzerooverlaphigh"


def test_the_alert_and_the_log_name_the_cause(story: Story) -> None:
    description = _named(story.fired, ZERO_OVERLAP, "tiny")[0]["annotations"]["description"]
    assert description.endswith("Last cause found: token_shift, offset 1.")
    assert "routes lag their tokens by one row within sequences" in story.log


def test_the_healthy_run_has_had_no_alert_of_replay_or_telemetry_not_even_a_pending_one(story: Story) -> None:
    assert story.alerts_of_healthy == {}
    assert "healthy" not in {alert["labels"]["run"] for alert in (*story.fired, *story.resolved)}
    assert min(value for (run, _), value in story.agreement.items() if run == "healthy") > 0.95


@pytest.mark.parametrize(("name", "run"), sorted(EXPECTED))
def test_the_alert_ends_with_the_run(story: Story, name: str, run: str) -> None:
    assert _named(story.resolved, name, run)


def test_no_process_is_left(story: Story) -> None:
    assert story.left_over == []

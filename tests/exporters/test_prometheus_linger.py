"""The endpoint after the end of its run, at the exit of its process, and in forks of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from moe_telemetry_exporters.prometheus import PrometheusExporter, linger
from tests.exporters.prometheus_endpoint import (
    SMALL,
    finished,
    get_from,
    port_of,
    threads,
    wait_until,
)

# after the end


def test_without_lingering_the_port_is_free_at_once(exporter: PrometheusExporter) -> None:
    port = port_of(exporter)
    exporter.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        get_from(port)


def _lingering(seconds: float = 1e6) -> tuple[PrometheusExporter, int]:
    exporter = PrometheusExporter(port=0, linger_seconds=seconds)
    exporter.start()
    exporter.export(SMALL)
    port = port_of(exporter)
    return exporter, port


def test_an_endpoint_lingers_until_its_scraper_has_seen_the_end() -> None:
    exporter, port = _lingering()
    assert b'moe_telemetry_run_finished{run="run-1"} 0' in get_from(port)
    exporter.export(finished(SMALL))
    exporter.close()
    exporter.close()
    assert exporter.url is None
    get_from(port, "/live.json")  # no scrape
    get_from(port, "/metrics?name[]=moe_telemetry_step")  # no whole one
    assert b'moe_telemetry_run_finished{run="run-1"} 1' in get_from(port)
    wait_until(lambda: threads() == [])
    with pytest.raises(urllib.error.URLError, match="refused"):
        get_from(port)


def test_an_endpoint_that_nobody_has_scraped_yet_lingers_for_a_first_scrape() -> None:
    exporter, port = _lingering()
    exporter.export(finished(SMALL))
    exporter.close()
    assert b"run_finished" in get_from(port)
    wait_until(lambda: threads() == [])


def test_an_endpoint_lingers_no_longer_than_asked() -> None:
    exporter, _ = _lingering(0.05)
    exporter.export(finished(SMALL))
    exporter.close()
    wait_until(lambda: threads() == [])


def test_everybody_who_scrapes_is_waited_for() -> None:
    audience = linger.Audience()
    audience.scraped("10.0.0.1", finished=False)
    audience.scraped("10.0.0.2", finished=False)
    audience.scraped("10.0.0.1", finished=True)
    waiter = threading.Thread(target=audience.wait, args=(1e6, threading.Event()))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    audience.scraped("10.0.0.2", finished=True)
    waiter.join()


def test_the_next_run_of_a_process_takes_the_port_of_one_that_lingers() -> None:
    exporter, port = _lingering()
    exporter.export(finished(SMALL))
    exporter.close()
    second = PrometheusExporter(port=port)
    second.start()
    second.export(replace(SMALL, run="run-2"))
    assert b'run="run-2"' in get_from(port)
    second.close()
    assert threads() == []


def test_an_endpoint_that_has_nothing_to_show_does_not_linger() -> None:
    exporter = PrometheusExporter(port=0, linger_seconds=1e6)
    exporter.start()
    exporter.close()
    assert threads() == []


# processes


def _python(script: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def _say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


_START = """
import os, sys, warnings
from dataclasses import replace
from moe_telemetry.delivery import Delivery
from moe_telemetry.testing import make_snapshot
from moe_telemetry_exporters.prometheus import PrometheusExporter
warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, about a fork with threads
snapshot = make_snapshot(num_layers=1)
exporter = PrometheusExporter(port=0, linger_seconds=float(os.environ.get("LINGER", "0")))
exporter.start()
exporter.export(snapshot)
port = int(exporter.url.split(":")[2].split("/")[0])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_neither_holds_nor_serves_the_port_and_may_have_one_of_its_own() -> None:
    script = (
        _START
        + """
files = len(os.listdir("/proc/self/fd"))
end, tell = os.pipe()
child = os.fork()
if not child:
    assert len(os.listdir("/proc/self/fd")) < files, "the child has the parent's sockets"
    assert exporter.url is None
    exporter.close()
    own = PrometheusExporter(port=0)
    own.start()
    own.export(replace(snapshot, run="child"))
    print("child", own.url.split(":")[2].split("/")[0], flush=True)
    os.read(end, 1)
    own.close()
    os._exit(0)
print("parent", port, flush=True)
sys.stdin.readline()
exporter.close()
print("closed", flush=True)
sys.stdin.readline()
os.write(tell, b"x")
sys.exit(os.waitpid(child, 0)[1])
"""
    )
    with _python(script) as process:
        ports = {name: int(port) for name, port in (_line(process).split() for _ in range(2))}
        assert b'run="run-1"' in get_from(ports["parent"])
        assert b'run="child"' in get_from(ports["child"])
        _say(process)
        assert _line(process) == "closed"
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", ports["parent"]))
            again.listen()
        assert b'run="child"' in get_from(ports["child"])
        _say(process)
    assert process.returncode == 0


def test_a_process_that_ends_waits_for_the_last_scrape() -> None:
    script = (
        _START
        + """
exporter.export(replace(snapshot, health=replace(snapshot.health, run_finished=True)))
exporter.close()
print(port, flush=True)
"""
    )
    with _python(script, LINGER="1e6") as process:
        port = int(_line(process))
        assert b'moe_telemetry_run_finished{run="run-1"} 1' in get_from(port)
    assert process.returncode == 0


def test_a_run_that_is_closed_at_exit_waits_for_a_moment() -> None:
    script = (
        _START
        + """
import atexit
delivery = Delivery([("prometheus", exporter)])
delivery.put(replace(snapshot, health=replace(snapshot.health, run_finished=True)))
atexit.register(lambda: print(port, flush=True) or delivery.close(10))
"""
    )
    with _python(script, LINGER="1e6") as process:
        port = int(_line(process))
        wait_until(lambda: b'moe_telemetry_run_finished{run="run-1"} 1' in get_from(port))
    assert process.returncode == 0


def test_files_for_many_processes_are_not_ours_to_use(tmp_path: Path) -> None:
    script = (
        _START
        + """
import urllib.request
with urllib.request.urlopen(exporter.url) as response:
    print(sum(line.startswith(b"moe_telemetry_step{") for line in response))
exporter.close()
"""
    )
    with _python(script, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)) as process:
        assert _line(process) == "1"
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []

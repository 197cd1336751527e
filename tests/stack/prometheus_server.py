"""Servers of the Prometheus project of the test's own, and questions to them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.stack.processes import free_port, running, wait_until

_CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs: [{{job_name: moe, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]
"""


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expression: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the value of each series of an instant query, by the values of some labels."""
        result = self._ask("query?" + urllib.parse.urlencode({"query": expression}))["result"]
        return {tuple(series["metric"][label] for label in labels): float(series["value"][1]) for series in result}

    def wait_for(self, expression: str, value: float) -> None:
        """Wait until a query without labels has a value."""
        wait_until(lambda: self.query(expression).get(()) == value, f"{expression} is {value}")

    def scrape_errors(self) -> dict[str, str]:
        """Return what went wrong at the last scrape of each job's target, nothing where it went well."""
        targets = self._ask("targets")["activeTargets"]
        return {target["labels"]["job"]: target["lastError"] for target in targets if target["health"] != "unknown"}

    def _ask(self, question: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{question}", timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]


def scraping(jobs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a configuration that scrapes twice a second: by job, its ports and whatever else Prometheus knows."""
    configs = [
        {
            "job_name": name,
            "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in job["ports"]]}],
            **{key: value for key, value in job.items() if key != "ports"},
        }
        for name, job in jobs.items()
    ]
    # JSON is YAML
    return json.dumps({"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": configs})


def program(name: str) -> str:
    """Return the path of a program; without it the test is skipped, and fails where CI is set."""
    path = shutil.which(name)
    if path is None and "CI" in os.environ:
        pytest.fail(f"needs {name}: make setup", pytrace=False)
    return path or pytest.skip(f"needs {name}: make setup")


@contextmanager
def pushgateway_running(folder: Path, options: Sequence[str] = ()) -> Iterator[int]:
    """Run a Pushgateway until the end of the block, and return its port."""
    port = free_port()
    command = [
        program("prometheus-pushgateway"),
        f"--web.listen-address=127.0.0.1:{port}",
        f"--persistence.file={folder / 'pushgateway.data'}",  # Debian's default is a file that all share
        *options,
    ]
    with running(command, folder / "pushgateway.log"):
        wait_until(lambda: accepts_connections(port), "the Pushgateway is ready")
        yield port


@contextmanager
def node_exporter_running(directory: Path, folder: Path) -> Iterator[int]:
    """Run a node_exporter that shows the files of a directory and nothing else, and return its port."""
    port = free_port()
    command = [
        program("prometheus-node-exporter"),
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={directory}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, folder / f"node_exporter{port}.log"):
        wait_until(lambda: accepts_connections(port), "node_exporter is ready")
        yield port


def accepts_connections(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        return True


@contextmanager
def prometheus_scraping(port: int, folder: Path) -> Iterator[Prometheus]:
    """Run a server that scrapes a port of this machine twice a second, until the end of the block."""
    with prometheus_running(_CONFIG.format(port=port), folder) as server:
        yield server


@contextmanager
def prometheus_running(configuration: str, folder: Path) -> Iterator[Prometheus]:
    """Run a server until the end of the block; its data and its log are in `folder`."""
    config = folder / "prometheus.yml"
    config.write_text(configuration)
    own_port = free_port()
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{own_port}",
        "--log.level=warn",
    ]
    url = f"http://127.0.0.1:{own_port}"
    with running(command, folder / "prometheus.log"):
        wait_until(lambda: is_ready(url), "Prometheus is ready")
        yield Prometheus(url)


def is_ready(url: str) -> bool:
    """Ask a server of the Prometheus project whether it is ready."""
    with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as response:
        return bool(response.status == 200)

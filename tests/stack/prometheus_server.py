"""A Prometheus server of the test's own, and questions to it."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
        parameters = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{parameters}", timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return {
            tuple(series["metric"][label] for label in labels): float(series["value"][1])
            for series in answer["data"]["result"]
        }


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

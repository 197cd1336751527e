"""Prometheus with rules, an Alertmanager, and a webhook: all that is between a metric and a person's pager."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.stack.processes import free_port, running, wait_until
from tests.stack.prometheus_server import Prometheus, is_ready, prometheus_running

_PROMETHEUS = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: ['{rules}/*.yaml']
alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{alertmanager}']}}]}}]}}
scrape_configs: [{{job_name: moe, static_configs: [{{targets: {targets}}}]}}]
"""
# grouped as grafana/runbook.md says
_ALERTMANAGER = """
route: {{receiver: pager, group_by: [alertname, run], group_wait: 1s, group_interval: 1s, repeat_interval: 1h}}
receivers: [{{name: pager, webhook_configs: [{{url: 'http://127.0.0.1:{webhook}/', send_resolved: true}}]}}]
"""


@dataclass
class Webhook:
    """What an Alertmanager has sent."""

    port: int
    alerts: list[dict[str, Any]] = field(default_factory=list)

    def received(self, status: str) -> list[dict[str, Any]]:
        """Return the alerts that came as `firing` or `resolved`."""
        return [alert for alert in list(self.alerts) if alert["status"] == status]

    def has(self, status: str, expected: AbstractSet[tuple[str, str]]) -> bool:
        """Tell whether all of these alerts, by name and run, have come with this status."""
        return expected <= {(alert["labels"]["alertname"], alert["labels"]["run"]) for alert in self.received(status)}


@contextmanager
def webhook_listening() -> Iterator[Webhook]:
    """Listen on a port of this machine for what an Alertmanager sends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            webhook.alerts.extend(json.loads(body)["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        webhook = Webhook(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield webhook
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def alerting(ports: Sequence[int], rules: Path, webhook: Webhook, folder: Path) -> Iterator[Prometheus]:
    """Scrape these ports and evaluate these rules every second; alerts go to the webhook by an Alertmanager."""
    targets = [f"127.0.0.1:{port}" for port in ports]
    with _alertmanager(webhook, folder) as port:
        configuration = _PROMETHEUS.format(rules=rules, alertmanager=port, targets=targets)
        with prometheus_running(configuration, folder) as server:
            yield server


@contextmanager
def _alertmanager(webhook: Webhook, folder: Path) -> Iterator[int]:
    config, port = folder / "alertmanager.yml", free_port()
    config.write_text(_ALERTMANAGER.format(webhook=webhook.port))
    command = [
        "prometheus-alertmanager",
        f"--config.file={config}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        "--log.level=warn",
    ]
    with running(command, folder / "alertmanager.log"):
        wait_until(lambda: is_ready(f"http://127.0.0.1:{port}"), "Alertmanager is ready")
        yield port

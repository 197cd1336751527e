"""A TensorBoard server of the test's own, and questions to it."""

from __future__ import annotations

import json
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stack.processes import free_port, running, wait_until


@dataclass(frozen=True)
class TensorBoard:
    url: str

    def get(self, route: str, **parameters: str | int) -> Any:
        """Return the JSON that a route of a plugin answers."""
        return json.loads(self.read(route, **parameters))

    def read(self, route: str, **parameters: str | int) -> bytes:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/data/plugin/{route}?{query}", timeout=30) as response:
            return bytes(response.read())

    def points(self, run: str, tag: str) -> list[tuple[int, float]]:
        """Return (step, value) of a scalar, in the order of the server."""
        return [(step, value) for _, step, value in self.get("scalars/scalars", run=run, tag=tag)]


@contextmanager
def tensorboard_running(logdir: Path, folder: Path, *options: str) -> Iterator[TensorBoard]:
    """Run a server until the end of the block, its log in `folder`."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "tensorboard.main", f"--logdir={logdir}", f"--port={port}"]
    with running([*command, "--host=127.0.0.1", "--reload_interval=1", *options], folder / "tensorboard.log"):
        server = TensorBoard(f"http://127.0.0.1:{port}")
        wait_until(lambda: server.get("scalars/tags"), "TensorBoard has read the log")
        yield server

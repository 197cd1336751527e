"""Real programs that the tests of exporters run, where they are installed."""

from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture
def promtool() -> str:
    return _program("promtool")


@pytest.fixture
def prometheus() -> str:
    return _program("prometheus")


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None and os.environ.get("CI"):
        pytest.fail(f"{name} is not installed, and CI is set")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path

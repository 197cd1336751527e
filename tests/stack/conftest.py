"""A browser for all tests of this folder that want one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.stack.live_pages import ARGUMENTS, DESK, Open, Visit


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        reason = "needs chromium: make setup"
        pytest.fail(reason, pytrace=False) if "CI" in os.environ else pytest.skip(reason)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=[*ARGUMENTS])


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    contexts = []

    def open_page(size: tuple[int, int] = DESK, scheme: Any = "light") -> Visit:
        width, height = size
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(20_000)
        return Visit(context.new_page())

    yield open_page
    for context in contexts:
        context.close()

"""A real Chromium in front of a real `kb serve`: fixtures for tests of the pages.

A test file says `pytest_plugins = ["chromium"]`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from programs import program
from replicas import Place, Replica, started
from shown import fill

from kb.store.database import Database

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}


@contextmanager
def launched() -> Iterator[Browser]:
    """Chromium of the system, without a window. Skips where there is none."""
    path = program("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(browser: Browser, url: str, *, expected: str = "", **context: Any) -> Iterator[Page]:
    """A page in a profile of its own. At its end nothing may have gone wrong in it: see `watch`."""
    troubles: list[str] = []
    made = browser.new_context(**{"viewport": DESKTOP, **context})
    try:
        page = made.new_page()
        watch(page, troubles, expected)
        page.goto(url)
        yield page
        assert troubles == []
    finally:
        made.close()


def watch(page: Page, troubles: list[str], expected: str = "") -> None:
    """Note errors on the console but those with the text that is expected, dialogs, and requests to other hosts."""
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on(
        "console",
        lambda said: (
            troubles.append(f"console: {said.text}")
            if said.type in ("error", "warning") and not (expected and expected in said.text)
            else None
        ),
    )
    page.on(
        "request",
        lambda request: (
            troubles.append(f"request: {request.url}")
            if urlsplit(request.url).hostname not in ("127.0.0.1", None)
            else None
        ),
    )


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@contextmanager
def filled_service(path: Path, cache: Path, *args: str) -> Iterator[Replica]:
    """`kb serve` with reports and gaps in its database."""
    shutil.copytree(cache, path / "cache")
    fill(Database.open(path / "service.db"))
    with started(Place(path, path / "cache"), *args) as replica:
        yield replica


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, built_in_index: Path, chromium: Browser) -> Iterator[Replica]:
    """Asks for Chromium first: without it no service is started for nothing."""
    with filled_service(tmp_path_factory.mktemp("service"), built_in_index) as replica:
        yield replica

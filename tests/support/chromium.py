"""A real Chromium that is watched for errors, and a real `kb serve` with something to show."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Error,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

from kb.store.database import Database
from tests.support.console import GENEROUS_S
from tests.support.programs import program
from tests.support.replicas import Place, Replica, started
from tests.support.sample_data import fill

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE: ViewportSize = {"width": 390, "height": 844}
LONGEST_MS = GENEROUS_S * 1000
DESKTOP: ViewportSize = {"width": 1280, "height": 900}


expect.set_options(timeout=LONGEST_MS)


@contextmanager
def launched() -> Iterator[Browser]:
    """The system's Chromium, without a window. Skips if there is none."""
    path = program("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=LONGEST_MS)
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """Records what must not happen in a page: errors on its console, dialogs, requests to another host."""

    def __init__(self, page: Page, expected: str = "") -> None:
        self._expected = expected
        self.troubles: list[str] = []
        page.on("pageerror", self._error)
        page.on("dialog", self._dialog)
        page.on("console", self._console)
        page.on("request", self._request)

    def _error(self, error: Error) -> None:
        self.troubles.append(f"error: {error}")

    def _dialog(self, dialog: Dialog) -> None:
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _console(self, message: ConsoleMessage) -> None:
        is_expected = bool(self._expected) and self._expected in message.text
        if message.type in ("error", "warning") and not is_expected:
            self.troubles.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if urlsplit(request.url).hostname not in ("127.0.0.1", None):
            self.troubles.append(f"request: {request.url}")


@contextmanager
def visit(browser: Browser, url: str, expected: str = "", **context: Any) -> Iterator[Page]:
    """A page in a new profile. At the end, fails if anything went wrong in it except what is `expected`."""
    made = browser.new_context(**{"viewport": DESKTOP, **context})
    try:
        made.set_default_timeout(LONGEST_MS)
        page = made.new_page()
        watch = Watch(page, expected)
        page.goto(url)
        yield page
        assert watch.troubles == []
    finally:
        made.close()


@contextmanager
def filled_service(path: Path, cache: Path, *args: str) -> Iterator[Replica]:
    """`kb serve` with reports and gaps in its database."""
    shutil.copytree(cache, path / "cache")
    fill(Database.open(path / "service.db"))
    with started(Place(path, path / "cache"), *args) as replica:
        yield replica

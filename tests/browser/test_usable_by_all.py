"""Every page, for everybody: screen readers (axe-core), dark and light, a phone; and nothing from another host."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from tests.support.chromium import DESKTOP, PHONE, visit
from tests.support.replicas import Replica
from tests.support.sample_data import ENTRY, QUESTION

pytest_plugins = ["tests.support.browser_fixtures"]

PAGES = {
    "home": "/",
    "tag": "/?tag=fsdp&lang=zh",
    "search": f"/?q={QUESTION}&gpu=H100",
    "no answer": "/?q=zebra+crossing+recipes",
    "entry": f"/entries/{ENTRY}",
    "Chinese entry": f"/entries/{ENTRY}?lang=zh",
    "entry with tables": "/entries/connection-reset-by-peer",
    "diagnose": "/diagnose",
    "graph": "/graph",
    "gaps": "/gaps",
    "sign-in": "/sign-in",
    "not found": "/entries/checkpoint-save",
}
MODES: dict[str, dict[str, Any]] = {
    "light": {"viewport": DESKTOP, "color_scheme": "light"},
    "dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "dark", "has_touch": True, "is_mobile": True},
}


def check(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{wide} pixels stand out on the right"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_usable(chromium: Browser, service: Replica, name: str, mode: str) -> None:
    expected = "404" if name == "not found" else ""
    with visit(chromium, service.url + PAGES[name], expected, reduced_motion="reduce", **MODES[mode]) as page:
        check(page)


@pytest.mark.parametrize("mode", MODES)
def test_a_diagnosis_is_usable(chromium: Browser, service: Replica, mode: str) -> None:
    with visit(chromium, f"{service.url}/diagnose", reduced_motion="reduce", **MODES[mode]) as page:
        page.get_by_label("or paste text").fill("epoch 1\nRuntimeError: the flux capacitor is empty\nNCCL timeout\n")
        page.get_by_role("button", name="Diagnose").click()
        page.locator("#results .note").first.wait_for()
        check(page)


def test_letters_may_be_twice_as_large_on_a_phone(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/{ENTRY}", viewport=PHONE) as page:
        page.evaluate("document.styleSheets[0].insertRule('html { font-size: 30px !important }', 0)")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0

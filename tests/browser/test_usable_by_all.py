"""Every page, for everybody: screen readers (axe-core), dark and light, a phone; and nothing from another host."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from tests.support.chromium import DESKTOP, PHONE, visit
from tests.support.replicas import Replica
from tests.support.sample_data import ENTRY, QUESTION

pytestmark = pytest.mark.slow

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
    "Chinese graph of an area": "/graph?area=memory&lang=zh",
    "Chinese search": "/?q=oom&lang=zh",
    "gaps": "/gaps",
    "sign-in": "/sign-in",
    "not found": "/entries/checkpoint-save",
}
SCREENS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": DESKTOP},
    "phone": {"viewport": PHONE, "has_touch": True, "is_mobile": True},
}
ALL: dict[str, Any] = {"resultTypes": ["violations"]}
OF_COLOURS = {**ALL, "runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}


def check(page: Page) -> None:
    """In both colour schemes, between which nothing but colours differs."""
    page.emulate_media(color_scheme="light")
    check_as_shown(page, ALL)
    page.emulate_media(color_scheme="dark")
    check_as_shown(page, OF_COLOURS)


def check_as_shown(page: Page, rules: dict[str, Any]) -> None:
    result = Axe().run(page, options=rules)
    assert result.violations_count == 0, result.generate_report()
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{wide} pixels stand out on the right"


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_usable(chromium: Browser, service: Replica, name: str, screen: str) -> None:
    expected = "404" if name == "not found" else ""
    with visit(chromium, service.url + PAGES[name], expected, reduced_motion="reduce", **SCREENS[screen]) as page:
        check(page)


@pytest.mark.parametrize("screen", SCREENS)
def test_a_diagnosis_is_usable(chromium: Browser, service: Replica, screen: str) -> None:
    with visit(chromium, f"{service.url}/diagnose", reduced_motion="reduce", **SCREENS[screen]) as page:
        page.get_by_label("or paste text").fill("epoch 1\nRuntimeError: the flux capacitor is empty\nNCCL timeout\n")
        page.get_by_role("button", name="Diagnose").click()
        page.locator("#results .note").first.wait_for()
        check(page)


def test_letters_may_be_twice_as_large_on_a_phone(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/{ENTRY}", viewport=PHONE) as page:
        page.evaluate("document.styleSheets[0].insertRule('html { font-size: 30px !important }', 0)")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0

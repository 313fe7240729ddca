"""The graph of causes in a real browser: filtered, zoomed, walked with the keyboard, and a list on a phone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, expect

from kb.content.area import Area
from kb.content.catalog import load_catalog
from kb.content.causes import graph
from kb.content.roots import builtin_root
from tests.support.chromium import PHONE, visit
from tests.support.console import wait_for
from tests.support.replicas import Replica

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.support.browser_fixtures"]

ENTRY = "host-oom-killed"
CATALOG = load_catalog((builtin_root(),))
GRAPH = graph(CATALOG)
DRAWN = {name for edge in (*GRAPH.causes, *GRAPH.masks) for name in edge}
IN_MEMORY = sum(CATALOG.get(name).meta.area is Area.MEMORY for name in DRAWN)


def test_the_whole_graph_fits_the_page_and_can_be_enlarged(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/graph") as page:
        box, svg = page.locator(".map"), page.locator(".map svg")
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
        width = svg.evaluate("svg => svg.getBoundingClientRect().width")
        page.get_by_role("button", name="Larger").click()
        page.get_by_role("button", name="Larger").click()
        assert svg.evaluate("svg => svg.getBoundingClientRect().width") > width * 1.5
        assert box.evaluate("box => box.scrollWidth > box.clientWidth")
        box.focus()
        page.keyboard.press("ArrowRight")
        wait_for(lambda: box.evaluate("box => box.scrollLeft > 0"), "the map to move")
        page.get_by_role("button", name="Fit").click()
        assert svg.evaluate("svg => svg.getBoundingClientRect().width") == width


def test_an_entry_with_focus_shows_its_own_arrows(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/graph") as page:
        node = page.locator(f".map a[data-id={ENTRY}]")
        node.focus()
        arrows = page.locator(".map path.on")
        expect(arrows).not_to_have_count(0)
        ends = arrows.evaluate_all("paths => paths.map(path => [path.dataset.from, path.dataset.to])")
        assert all(ENTRY in pair for pair in ends)
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{service.url}/entries/{ENTRY}")


def test_a_filter_leaves_an_area_and_what_is_beside_it(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/graph") as page:
        page.get_by_label("Area").select_option("memory")
        expect(page).to_have_url(f"{service.url}/graph?area=memory")
        expect(page.locator(".map a:not(.near)")).to_have_count(IN_MEMORY)
        expect(page.locator(".map a.near[data-id=torchrun-root-cause-hidden]")).to_have_count(1)
        page.get_by_label("Text").fill("fragmentation")
        expect(page.locator(".map a:not(.near)")).to_have_count(1)
        page.get_by_role("link", name="Show all").click()
        expect(page.locator(".map a:not(.near)")).to_have_count(len(DRAWN))


def test_on_a_phone_it_is_a_list_by_area(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/graph", viewport=PHONE) as page:
        expect(page.locator(".map")).to_be_hidden()
        page.get_by_role("heading", name="memory").click()
        expect(page.get_by_role("link", name=re.compile("killed with SIGKILL")).first).to_be_visible()


def test_without_scripts_the_filter_is_a_form(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/graph", java_script_enabled=False) as page:
        expect(page.get_by_role("button", name="Larger")).to_be_hidden()
        page.get_by_label("Text").fill("nothing is called so")
        page.get_by_role("button", name="Filter").click()
        expect(page.get_by_text("0 entries")).to_be_visible()
        page.get_by_label("Text").fill("fsdp")
        page.get_by_role("button", name="Filter").click()
        expect(page.locator(".map a[data-id=fsdp-save-host-oom]")).to_be_visible()

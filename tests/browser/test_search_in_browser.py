"""Searching in a real browser: as one types, with the keyboard alone, without scripts."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Route, expect

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from tests.support.chromium import visit
from tests.support.replicas import Replica
from tests.support.sample_data import ENTRY, QUESTION

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.support.browser_fixtures"]
ENTRIES = len(load_catalog((builtin_root(),)).entries)


def test_typing_shows_results_and_the_address_follows(chromium: Browser, service: Replica) -> None:
    with visit(chromium, service.url) as page:
        page.get_by_label("Paste an error").press_sequentially(QUESTION, delay=20)
        expect(page.locator(".hits h2 a").first).to_have_attribute("href", f"/entries/{ENTRY}")
        expect(page).to_have_url(re.compile(r"q=ALLGATHER\+timeout\+save"))
        expect(page).to_have_title(f"{QUESTION} · kb")
        expect(page.get_by_role("status")).to_have_text(re.compile(r"^\d+ entries$"))
        page.reload()
        expect(page.locator(".hits h2 a").first).to_have_attribute("href", f"/entries/{ENTRY}")


def never_answered(_: Route) -> None:
    """Neither goes on nor is refused."""


def test_the_last_question_wins_over_slower_answers_to_earlier_ones(chromium: Browser, service: Replica) -> None:
    with visit(chromium, service.url) as page:
        page.route(re.compile(r"q=slow\b"), never_answered)
        field = page.get_by_label("Paste an error")
        field.fill("slow")
        expect(page.locator("#results")).to_have_attribute("aria-busy", "true")
        field.fill("zebra crossing recipes")
        expect(page.get_by_role("heading", name="kb does not know this")).to_be_visible()
        expect(page.locator("#results")).not_to_have_attribute("aria-busy", "true")


def test_emptying_the_field_brings_the_overview_back(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/?q={QUESTION}") as page:
        page.get_by_label("Paste an error").fill("")
        expect(page.get_by_role("heading", name=f"{ENTRIES} entries")).to_be_visible()


def test_a_tag_is_taken_off_by_its_box(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/?q=timeout&tag=grpo") as page:
        count = page.locator(".hits > li").count()
        page.get_by_label("grpo").uncheck()
        expect(page.locator(".hits > li")).to_have_count(10)
        assert 0 < count < 10


def test_a_service_that_is_gone_is_said_and_not_shown_as_no_result(chromium: Browser, service: Replica) -> None:
    with visit(chromium, service.url, expected="ERR_FAILED") as page:
        page.route(re.compile(r"\?q="), lambda route: route.abort())
        page.get_by_label("Paste an error").fill("anything")
        expect(page.get_by_role("alert")).to_contain_text("does not answer")


def test_hits_that_were_verified_on_the_readers_gpu_say_so(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/?q={QUESTION}") as page:
        page.get_by_label("My GPU").fill("H100")
        expect(page.locator(".hits > li").first.locator(".verdict")).to_have_text("verified")


def test_everything_is_found_with_the_keyboard_alone(chromium: Browser, service: Replica) -> None:
    with visit(chromium, service.url) as page:
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        expect(page.get_by_label("Paste an error")).to_be_focused()
        page.keyboard.type(QUESTION)
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("q=ALLGATHER.*&status="))
        first = page.locator(".hits h2 a").first
        for _ in range(20):
            page.keyboard.press("Tab")
            if first.evaluate("link => link === document.activeElement"):
                break
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(f"/entries/{ENTRY}"))


def test_a_slash_and_the_arrows_lead_to_an_entry(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/?q={QUESTION}") as page:
        field, links = page.get_by_label("Paste an error"), page.locator(".hits h2 a")
        page.keyboard.press("/")
        expect(field).to_be_focused()
        expect(field).to_have_value(QUESTION)
        for key, place in (("ArrowDown", 0), ("ArrowDown", 1), ("ArrowUp", 0)):
            page.keyboard.press(key)
            expect(links.nth(place)).to_be_focused()
        assert links.first.evaluate("link => getComputedStyle(link).outlineStyle") == "solid"
        page.keyboard.press("ArrowUp")
        expect(field).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Escape")
        expect(field).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{service.url}/entries/{ENTRY}")
        page.keyboard.press("/")
        expect(page.get_by_label("Search the incidents")).to_be_focused()


def test_escape_empties_the_field_and_then_leaves_it(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/?q={QUESTION}") as page:
        page.keyboard.press("/")
        page.keyboard.press("Escape")
        expect(page.get_by_label("Paste an error")).to_have_value("")
        expect(page.get_by_role("heading", name=f"{ENTRIES} entries")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_label("Paste an error")).not_to_be_focused()


def test_a_slash_that_is_typed_is_a_letter(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/diagnose") as page:
        text = page.get_by_label("or paste text")
        text.press_sequentially("/dev/shm")
        expect(text).to_have_value("/dev/shm")


def test_the_language_is_changed_without_losing_the_question(chromium: Browser, service: Replica) -> None:
    with visit(chromium, service.url) as page:
        page.get_by_label("Paste an error").fill(QUESTION)
        page.wait_for_url(re.compile("q="))
        page.get_by_role("link", name="中文").click()
        expect(page.get_by_role("button", name="搜索")).to_be_visible()
        expect(page.locator(".hits h2 a").first).to_have_attribute("href", f"/entries/{ENTRY}?lang=zh")


def test_without_scripts_a_search_is_a_form(chromium: Browser, service: Replica) -> None:
    with visit(chromium, service.url, java_script_enabled=False) as page:
        page.get_by_label("Paste an error").fill(QUESTION)
        page.get_by_label("Status").select_option("confirmed")
        page.get_by_role("button", name="Search").click()
        assert page.locator(".hits h2 a").first.get_attribute("href") == f"/entries/{ENTRY}"
        assert "status=confirmed" in page.url

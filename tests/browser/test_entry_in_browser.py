"""An entry in a real browser: read, copied, in both languages, with scripts and without."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, expect

from tests.support.chromium import visit
from tests.support.replicas import Replica
from tests.support.sample_data import ENTRY

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.support.browser_fixtures"]


def test_a_command_is_copied(chromium: Browser, service: Replica) -> None:
    url = f"{service.url}/entries/{ENTRY}"
    with visit(chromium, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        command = page.locator("pre.command")
        command.get_by_role("button", name="Copy").click()
        expect(page.locator("#announcement")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == f"kb verify {ENTRY} --report {service.url}"


def test_a_command_is_copied_where_the_browser_has_no_clipboard_for_pages(chromium: Browser, service: Replica) -> None:
    url = f"{service.url}/entries/{ENTRY}"
    with visit(chromium, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.evaluate(
            "navigator.clipboard.readText().then(() => {"
            " window.read = navigator.clipboard.readText.bind(navigator.clipboard);"
            " Object.defineProperty(navigator, 'clipboard', {value: undefined}) })"
        )
        page.locator("pre.command").get_by_role("button", name="Copy").click()
        expect(page.locator("#announcement")).to_have_text("Copied")
        assert page.evaluate("window.read()").startswith(f"kb verify {ENTRY}")


def test_an_entry_is_copied_for_a_ticket(chromium: Browser, service: Replica) -> None:
    url = f"{service.url}/entries/{ENTRY}"
    with visit(chromium, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.get_by_role("link", name="Copy for a ticket").click()
        expect(page.locator("#announcement")).to_have_text("Copied")
        text = page.evaluate("navigator.clipboard.readText()")
        assert text.startswith(f"{ENTRY}: ")
        assert "\n\nCause: " in text and "\n\nFix:\n" in text
        assert text.endswith(f"\n{url}\n")
        assert page.url == url


def test_without_scripts_a_ticket_is_a_page_of_text(chromium: Browser, service: Replica) -> None:
    url = f"{service.url}/entries/{ENTRY}?lang=zh"
    with visit(chromium, url, expected="404", java_script_enabled=False) as page:  # a text names no icon
        page.get_by_role("link", name="复制到工单").click()
        expect(page).to_have_url(f"{service.url}/entries/{ENTRY}/ticket?lang=zh")
        text = page.locator("body").inner_text()
        assert text.startswith(f"{ENTRY}: ") and "原因: " in text
        assert f"{service.url}/entries/{ENTRY}?lang=zh" in text


def test_a_part_of_an_entry_has_an_address(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/{ENTRY}?lang=zh#fix") as page:
        expect(page.get_by_role("heading", name="修复")).to_be_in_viewport()
        page.get_by_role("heading", name="环境").get_by_role("link").click()
        expect(page).to_have_url(f"{service.url}/entries/{ENTRY}?lang=zh#environment")


def test_the_other_language_is_a_link_away_and_back(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/{ENTRY}") as page:
        page.get_by_role("link", name="中文").click()
        expect(page.get_by_role("heading", name="修复")).to_be_visible()
        expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
        page.get_by_role("link", name="English").click()
        expect(page.get_by_role("heading", name="Fix", exact=True)).to_be_visible()


def test_the_table_says_where_the_fix_was_verified(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/{ENTRY}") as page:
        rows = page.get_by_role("table").get_by_role("row")
        newest = rows.filter(has_text="2.7.1+cu128")
        expect(newest).to_contain_text("H100 (sample)")
        expect(newest).to_contain_text("verified")
        expect(newest).to_contain_text("12")
        expect(rows.filter(has_text="fix-ineffective")).to_contain_text("of an earlier wording")
        expect(rows.last).to_contain_text("fix-ineffective")


def test_the_graph_is_walked_with_the_keyboard(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/{ENTRY}") as page:
        node = page.locator(".graph a").filter(has_text="fsdp-save-host-oom")
        node.focus()
        expect(node).to_be_focused()
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{service.url}/entries/fsdp-save-host-oom")


def test_a_mark_leads_to_its_reference(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/{ENTRY}") as page:
        page.get_by_role("link", name="[thread 3]").first.click()
        expect(page.locator("#ref-3")).to_be_in_viewport()


def test_without_scripts_everything_is_read_and_feedback_is_given(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/{ENTRY}", java_script_enabled=False) as page:
        assert page.get_by_role("button", name="Copy").count() == 0
        assert page.get_by_role("heading", name="Known cases").is_visible()
        page.get_by_label("Your GPU").fill("H100")
        page.get_by_role("button", name="It helped").click()
        expect(page.get_by_text("Thank you")).to_be_visible()
    given = service.get(f"/v1/feedback?entry={ENTRY}")[1]["feedback"]
    assert {"entry": ENTRY, "gpu": "H100", "helped": 1, "not_helped": 0} in given


def test_an_entry_is_printed_without_what_only_a_screen_needs(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/{ENTRY}", color_scheme="dark") as page:
        page.emulate_media(media="print")
        expect(page.get_by_role("heading", name="Fix", exact=True)).to_be_visible()
        for gone in (".top", ".feedback form", ".copy"):
            expect(page.locator(gone).first).to_be_hidden()
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 32, 38)"


def test_an_unknown_entry_leads_on(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/entries/checkpoint-save", expected="404") as page:
        page.get_by_role("link", name=re.compile("checkpoint-save")).first.click()
        expect(page.get_by_role("heading", name="Symptom")).to_be_visible()

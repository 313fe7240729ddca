"""Diagnosing in a real browser: a log that is dropped, chosen or pasted, with scripts and without."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.chromium import visit
from tests.support.replicas import Replica
from tests.support.sample_data import ENTRY

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.support.browser_fixtures"]

LOG = Path(__file__).with_name("save.log")
DROP = """([zone, name, packed]) => {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(atob(packed), one => one.charCodeAt(0))], name));
  for (const kind of ["dragover", "drop"])
    zone.dispatchEvent(new DragEvent(kind, {dataTransfer: files, bubbles: true, cancelable: true}));
}"""


def drop(page: Page, name: str, data: bytes) -> None:
    page.evaluate(DROP, [page.query_selector(".drop"), name, base64.b64encode(data).decode()])


def expect_the_entry(page: Page) -> None:
    finding = page.locator(".findings > li").first
    expect(finding.get_by_role("link").first).to_have_attribute("href", f"/entries/{ENTRY}")
    expect(finding.locator("mark").first).to_contain_text("Watchdog caught collective operation timeout")
    expect(finding.locator(".excerpt li").first).to_have_text("Saving model checkpoint to output/checkpoint-5000")


def test_a_dropped_log_is_diagnosed_at_once(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/diagnose") as page:
        drop(page, "save.log", LOG.read_bytes())
        expect_the_entry(page)
        expect(page.locator("#results")).to_be_focused()
        expect(page.locator(".findings pre.command").first).to_contain_text(f"kb verify {ENTRY}")
        assert page.url == f"{service.url}/diagnose"


def test_a_second_log_takes_the_place_of_the_first(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/diagnose") as page:
        drop(page, "save.log", LOG.read_bytes())
        expect_the_entry(page)
        drop(page, "healthy.log", b"step 1 loss 2.0\nstep 2 loss 1.9\n")
        expect(page.get_by_role("heading", name="No error was printed")).to_be_visible()
        expect(page.locator(".findings")).to_have_count(0)


def test_an_unknown_failure_is_shown_first_and_candidates_have_no_commands(chromium: Browser, service: Replica) -> None:
    log = b"epoch 1\n[rank1]: acme.ShardError: shard 17 has no index\n[rank0]: NCCL WARN Connection reset by peer\n"
    with visit(chromium, f"{service.url}/diagnose") as page:
        drop(page, "train.log", log)
        expect(page.get_by_role("heading", name="No confident match")).to_be_visible()
        first = page.locator("#results figure").first
        expect(first.locator("figcaption")).to_contain_text("train.log")
        expect(first.locator("mark")).to_have_text("[rank1]: acme.ShardError: shard 17 has no index")
        expect(page.get_by_text("Rank 1 failed first")).to_be_visible()
        weaker = page.locator("details.weaker")
        expect(weaker.get_by_role("link").first).to_be_hidden()
        weaker.locator("summary").click()
        expect(weaker.get_by_role("link").first).to_be_visible()
        expect(page.locator("#results pre.command")).to_have_count(0)


def test_what_is_not_text_is_not_called_healthy(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/diagnose") as page:
        drop(page, "model.bin", b"\x7fELF" + bytes(500))
        expect(page.get_by_role("heading", name="Nothing here could be read")).to_be_visible()
        expect(page.locator("#results")).to_contain_text("model.bin: is binary and was not read")
        expect(page.locator("#results")).to_contain_text("kb reads text")
        expect(page.get_by_text("No error was printed")).to_have_count(0)


def test_a_finding_is_copied_with_its_line_which_is_never_sent_again(chromium: Browser, service: Replica) -> None:
    url = f"{service.url}/diagnose"
    with visit(chromium, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        drop(page, "save.log", LOG.read_bytes())
        expect_the_entry(page)
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.url + (request.post_data or "")))
        page.get_by_role("link", name="Copy for a ticket").first.click()
        expect(page.locator("#announcement")).to_have_text("Copied")
        text = page.evaluate("navigator.clipboard.readText()")
        assert f"{service.url}/entries/{ENTRY}" in text
        assert "\nEvidence: save.log:5 (rank 3): " in text
        assert sent == [f"{service.url}/entries/{ENTRY}/ticket"]


def test_a_log_is_chosen_and_sent_with_the_keyboard(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/diagnose") as page:
        page.get_by_label("Choose logs").set_input_files(LOG)
        page.get_by_role("button", name="Diagnose").focus()
        page.keyboard.press("Enter")
        expect_the_entry(page)


def test_a_log_that_is_too_large_is_not_sent_at_all(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/diagnose") as page:
        page.evaluate("document.querySelector('form.log').dataset.most = 100")
        drop(page, "save.log", LOG.read_bytes())
        expect(page.get_by_role("alert")).to_contain_text("larger than a page can take")


def test_without_scripts_a_chosen_log_is_answered_with_a_page(chromium: Browser, service: Replica) -> None:
    with visit(chromium, f"{service.url}/diagnose", java_script_enabled=False) as page:
        assert not page.get_by_text("or drop them here").is_visible()
        page.get_by_label("Choose logs").set_input_files(LOG)
        page.get_by_role("button", name="Diagnose").click()
        expect_the_entry(page)
        page.get_by_label("or paste text").fill(LOG.read_text())
        page.get_by_role("button", name="Diagnose").click()
        expect_the_entry(page)

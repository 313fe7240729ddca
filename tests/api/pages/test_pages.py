"""The pages as a browser without scripts gets them: what they say, where they lead, what is never in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kb.store import gaps
from kb.store.database import Database
from tests.support.console import ContentRoot, wait_for, wait_until_ready
from tests.support.page_reader import PAGE, get, text_of

ENGLISH, CHINESE = '<a class="anchor" href="#symptom">Symptom', '<a class="anchor" href="#symptom">症状'

pytest_plugins = ["tests.support.app_fixtures"]


def test_the_front_page_says_what_this_is_and_lists_every_entry_that_answers(client: httpx.Client) -> None:
    html = get(client, "/")
    assert "2 incidents of distributed GPU training" in text_of(html)
    assert re.findall(r'href="/entries/([a-z-]+)"', html) == ["slow-disk", "broken-thing"]  # in the order of areas


def test_a_question_gets_hits_with_the_words_that_matched(client: httpx.Client) -> None:
    html = get(client, "/?q=the+disk+is+slow")
    assert re.findall(r'href="/entries/([a-z-]+)', html)[0] == "slow-disk"
    assert "Matched" in html


def test_a_pasted_line_of_a_log_says_that_its_signature_matched(client: httpx.Client) -> None:
    assert "matches a signature of this incident" in get(client, "/?q=the+thing+broke:+code+99")


def test_a_tag_filters_and_can_be_taken_off_again(client: httpx.Client) -> None:
    html = get(client, "/?tag=storage")
    assert "1 entry tagged storage" in text_of(html)
    assert 'name="tag" value="storage" checked' in html


def test_an_area_is_not_repeated_by_a_tag_of_the_same_name(
    entries: ContentRoot, request: pytest.FixtureRequest
) -> None:
    path = entries.path / "entries" / "slow-disk.md"
    path.write_text(path.read_text().replace("tags: [test, storage]", "tags: [hardware, storage]"))
    client: httpx.Client = request.getfixturevalue("client")
    for address in ("/?q=the+disk+is+slow", "/entries/slow-disk"):
        html = get(client, address)
        assert 'class="tag area" href="/?area=hardware"' in html
        assert "/?tag=storage" in html
        assert "/?tag=hardware" not in html


def test_the_front_page_groups_the_entries_by_area_and_filters_by_it(client: httpx.Client) -> None:
    assert re.findall(r"/\?area=([a-z]+)", get(client, "/")) == ["hardware", "data"]
    filtered = get(client, "/?area=hardware")
    assert "1 entry about hardware" in text_of(filtered)
    assert '<option value="hardware" selected>' in filtered
    assert re.findall(r'href="/entries/([a-z-]+)"', filtered) == ["slow-disk"]


def test_a_search_is_filtered_by_area_and_a_hit_leads_to_its_area(client: httpx.Client) -> None:
    filtered = get(client, "/?q=the+thing+broke&area=data")
    assert re.findall(r'<h2><a href="/entries/([a-z-]+)"', filtered) == ["broken-thing"]
    assert "/?area=hardware" in get(client, "/?q=the+disk+is+slow")
    assert "one of checkpoint" in get(client, "/?q=disk&area=disks", 422)


def test_a_filter_that_nothing_passes_names_the_nearest(client: httpx.Client) -> None:
    assert "nearest: storage" in get(client, "/?q=disk&tag=storag", 422)


def test_a_value_that_is_too_long_is_refused_and_not_an_error_of_ours(client: httpx.Client) -> None:
    assert "gpu" in text_of(get(client, f"/?q=disk&gpu={'x' * 101}", 422))


def test_a_question_without_a_good_answer_says_so_and_is_counted(client: httpx.Client, app: FastAPI) -> None:
    html = get(client, "/?q=zebra+crossing+recipes")
    assert "kb does not know this" in html
    assert 'href="/diagnose"' in html
    wait_for(lambda: [gap.text for gap in gaps.page(app.state.database)], "the gap to be written")
    assert "zebra" in gaps.page(app.state.database)[0].text


def test_a_question_that_is_still_being_typed_is_not_counted(client: httpx.Client, app: FastAPI) -> None:
    get(client, "/?q=zebr", **{"Sec-Fetch-Dest": "empty"})
    app.state.gaps.write()
    assert gaps.page(app.state.database) == []


def test_an_entry_shows_its_parts_in_the_order_in_which_one_needs_them(client: httpx.Client) -> None:
    html = get(client, "/entries/broken-thing")
    assert re.findall(r'<h2 id="([a-z-]+)"', html) == [
        *("symptom", "root-cause", "fix", "how-to-tell", "why-it-works"),
        *("verdicts", "environment", "known-cases", "references", "feedback"),
    ]
    assert "kb verify broken-thing --report http://localhost" in html


def test_an_entry_is_plain_text_for_a_ticket(client: httpx.Client) -> None:
    answer = client.get("/entries/broken-thing/ticket", headers=PAGE)
    assert answer.headers["content-type"].startswith("text/plain")
    parts = answer.text.split("\n\n")
    assert parts[0].startswith("broken-thing: ")
    assert parts[1].startswith("Cause: ") and parts[2].startswith("Fix:\n")
    assert parts[-1] == f"{answer.url.copy_with(path='/entries/broken-thing')}\n"
    assert "[probe]" not in answer.text
    assert "no entry is called" in text_of(get(client, "/entries/nothing/ticket", 404))


def test_the_language_of_a_page_is_asked_for_or_the_browsers(client: httpx.Client) -> None:
    assert CHINESE in get(client, "/entries/broken-thing?lang=zh")
    assert CHINESE in get(client, "/entries/broken-thing", **{"Accept-Language": "zh-CN,zh;q=0.9,en;q=0.8"})
    assert ENGLISH in get(client, "/entries/broken-thing", **{"Accept-Language": "de,en;q=0.5,zh;q=0.3"})
    assert ENGLISH in get(client, "/entries/broken-thing?lang=en", **{"Accept-Language": "zh"})


@pytest.mark.parametrize(
    ("wanted", "heading"),
    [
        ("en-US,en;q=0.7,zh-CN;q=0.3", ENGLISH),
        ("de-DE,zh-CN;q=0.1", CHINESE),
        ("zh-CN,zh;q=0.9,en-US;q=0.8", CHINESE),
        ("zh-Hans-CN;q=0.2,en;q=0.3", ENGLISH),
        ("de-DE", ENGLISH),
        ("", ENGLISH),
    ],
)
def test_of_what_a_browser_prefers_the_quality_counts(client: httpx.Client, wanted: str, heading: str) -> None:
    assert heading in get(client, "/entries/broken-thing", **{"Accept-Language": wanted})


def test_a_withdrawn_entry_can_be_read_and_says_that_it_is_withdrawn(client: httpx.Client) -> None:
    assert "This entry was withdrawn" in get(client, "/entries/old-thing")


def test_an_unknown_entry_leads_to_the_nearest(client: httpx.Client) -> None:
    assert '<a href="/entries/broken-thing" lang="en">' in get(client, "/entries/broken-thin", 404)


def test_the_api_gives_the_same_page_to_who_asks_for_html(client: httpx.Client) -> None:
    api = client.get("/v1/entries/broken-thing", headers={"Accept": "text/html"})
    assert api.headers["content-type"].startswith("text/html")
    assert '<h2 id="fix"' in api.text


def test_while_the_index_is_being_opened_entries_are_listed_and_a_question_asks_itself_again(
    app: FastAPI, serve: Callable[[FastAPI], AbstractContextManager[httpx.Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(app) as client:
        wait_until_ready(app)
        opened, app.state.loading = app.state.loading, type(app.state.loading)()
        html = get(client, "/?q=thing", 503)
        listed = get(client, "/")
        app.state.listing = None
        early = get(client, "/", 503)
        app.state.loading = opened
    assert "broken-thing" in listed
    for page in (html, early):
        assert '<meta http-equiv="refresh"' in page
        assert "is being opened" in page


def test_an_address_that_leads_nowhere_is_a_page_for_a_browser_and_a_problem_for_others(client: httpx.Client) -> None:
    assert "there is nothing at /nowhere" in get(client, "/nowhere", 404)
    assert client.get("/nowhere").headers["content-type"] == "application/problem+json"
    assert client.get("/v1/nowhere", headers=PAGE).headers["content-type"] == "application/problem+json"


def test_what_pages_are_drawn_with_is_kept_for_ever_under_an_address_of_its_content(client: httpx.Client) -> None:
    addresses = re.findall(r'(?:href|src)="(/static/[^"]+)"', get(client, "/"))
    assert len(addresses) == 3
    for address in addresses:
        answer = client.get(address)
        assert "immutable" in answer.headers["cache-control"]
        assert answer.status_code == 200
    assert client.get("/static/kb.css").status_code == 404
    assert client.get("/static/..%2fpage.py").status_code == 404


@pytest.mark.parametrize("path", ["/", "/?q=disk", "/entries/broken-thing", "/diagnose", "/graph", "/gaps", "/sign-in"])
def test_no_page_has_a_script_or_a_style_of_its_own(client: httpx.Client, path: str) -> None:
    html = get(client, path)
    assert re.findall(r"<script(?! src=\"/static/)", html) == []
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=", html) == []
    assert re.findall(r'(?:src|<link[^>]+href)="(?!/static/)', html) == []


def test_content_without_any_link_between_entries_has_a_graph_page(client: httpx.Client) -> None:
    html = get(client, "/graph")
    assert "Not linked to another incident" in html
    assert "<svg" not in html


def test_reports_make_the_table_of_an_entry(app: FastAPI, entries: ContentRoot, serve: Any) -> None:
    from kb.store import reports
    from tests.support.sample_data import report

    database: Database = app.state.database
    database.prepare()
    for number, is_current in enumerate((True, True, False)):
        given = {**report("f" * 64, ["NVIDIA H100"], "570.1", "2.7.1", "verified", "hardware", is_current)}
        given |= {"id": "broken-thing"}
        reports.add_shared(database, given, "node", f"key-{number}", f"{number}")
    with serve(app) as client:
        wait_until_ready(app)
        wait_for(lambda: app.state.snapshot.verdict_counts, "the reports to be counted")
        html = get(client, "/entries/broken-thing")
    rows = [text_of(row) for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)[1:]]
    assert len(rows) == 2
    assert all("H100 verified" in row and "earlier wording" in row for row in rows)

"""The pages as a browser without scripts gets them: what they say, where they lead, what is never in them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from html import unescape
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from support import ContentRoot, wait_for

from kb.store import feedback, gaps, keys
from kb.store.database import Database
from kb.store.keys import Scope

pytest_plugins = ["served"]

PAGE = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
LOG = b"epoch 1\nepoch 2\nabout to break\nthe thing broke: code 42\nepoch 3\nepoch 4\nepoch 5\n"


def get(client: httpx.Client, path: str, status: int = 200, **headers: str) -> str:
    answer = client.get(path, headers={**PAGE, **headers})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    return answer.text


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


@pytest.fixture
def signed(app: FastAPI, client: httpx.Client) -> Callable[[Scope], str]:
    """Makes keys that the service knows of."""

    def make(scope: Scope) -> str:
        text = keys.new(app.state.database, "test", scope)[1]
        app.state.snapshot.refresh()
        return text

    return make


def test_the_front_page_says_what_this_is_and_lists_every_entry_that_answers(client: httpx.Client) -> None:
    html = get(client, "/")
    assert "2 incidents of distributed GPU training" in text_of(html)
    assert re.findall(r'href="/entries/([a-z-]+)"', html) == ["broken-thing", "slow-disk"]


def test_a_question_gets_hits_with_the_words_that_matched(client: httpx.Client) -> None:
    html = get(client, "/?q=the+disk+is+slow")
    assert re.findall(r'href="/entries/([a-z-]+)', html)[0] == "slow-disk"
    assert "Matched" in html


def test_a_pasted_line_of_a_log_says_that_its_signature_matched(client: httpx.Client) -> None:
    assert "a line that this incident prints" in get(client, "/?q=the+thing+broke:+code+99")


def test_a_tag_filters_and_can_be_taken_off_again(client: httpx.Client) -> None:
    html = get(client, "/?tag=storage")
    assert "1 entry tagged storage" in text_of(html)
    assert 'name="tag" value="storage" checked' in html


def test_a_filter_that_nothing_passes_names_the_nearest(client: httpx.Client) -> None:
    assert "nearest: storage" in get(client, "/?q=disk&tag=storag", 422)


def test_a_value_that_is_too_long_is_refused_and_not_an_error_of_ours(client: httpx.Client) -> None:
    assert "gpu" in text_of(get(client, f"/?q=disk&gpu={'x' * 101}", 422))


def test_a_question_without_a_good_answer_says_so_and_is_counted(client: httpx.Client, app: FastAPI) -> None:
    html = get(client, "/?q=zebra+crossing+recipes")
    assert "No entry answers this" in html
    assert 'href="/diagnose"' in html
    wait_for(lambda: [gap.text for gap in gaps.page(app.state.database)], "the gap to be written")
    assert "zebra" in gaps.page(app.state.database)[0].text


def test_a_question_that_is_still_being_typed_is_not_counted(client: httpx.Client, app: FastAPI) -> None:
    get(client, "/?q=zebr", **{"Sec-Fetch-Dest": "empty"})
    app.state.unanswered.write()
    assert gaps.page(app.state.database) == []


def test_an_entry_shows_its_parts_in_the_order_in_which_one_needs_them(client: httpx.Client) -> None:
    html = get(client, "/entries/broken-thing")
    assert re.findall(r'<h2 id="([a-z-]+)"', html) == [
        *("symptom", "root-cause", "fix", "how-to-tell", "why-it-works"),
        *("verdicts", "environment", "known-cases", "references", "feedback"),
    ]
    assert "kb verify broken-thing --report http://localhost" in html


def test_the_language_of_a_page_is_asked_for_or_the_browsers(client: httpx.Client) -> None:
    assert '<h2 id="症状"' in get(client, "/entries/broken-thing?lang=zh")
    assert '<h2 id="症状"' in get(client, "/entries/broken-thing", **{"Accept-Language": "zh-CN,zh;q=0.9,en;q=0.8"})
    assert '<h2 id="symptom"' in get(client, "/entries/broken-thing", **{"Accept-Language": "de,en;q=0.5,zh;q=0.3"})
    assert '<h2 id="symptom"' in get(client, "/entries/broken-thing?lang=en", **{"Accept-Language": "zh"})


def test_a_withdrawn_entry_can_be_read_and_says_that_it_is_withdrawn(client: httpx.Client) -> None:
    assert "This entry was withdrawn" in get(client, "/entries/old-thing")


def test_an_unknown_entry_leads_to_the_nearest(client: httpx.Client) -> None:
    assert '<a href="/entries/broken-thing">' in get(client, "/entries/broken-thin", 404)


def test_the_api_gives_the_same_page_to_who_asks_for_html(client: httpx.Client) -> None:
    api = client.get("/v1/entries/broken-thing", headers={"Accept": "text/html"})
    assert api.headers["content-type"].startswith("text/html")
    assert '<h2 id="fix"' in api.text


def test_while_the_index_is_being_opened_a_page_says_so_and_loads_itself_again(
    app: FastAPI, serve: Callable[[FastAPI], AbstractContextManager[httpx.Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(app) as client:
        app.state.loading.result(60)
        opened, app.state.loading = app.state.loading, type(app.state.loading)()
        html = get(client, "/", 503)
        app.state.loading = opened
    assert '<meta http-equiv="refresh"' in html
    assert "is being opened" in html


def test_an_address_that_leads_nowhere_is_a_page_for_a_browser_and_a_problem_for_others(client: httpx.Client) -> None:
    assert "nothing is at /nowhere" in get(client, "/nowhere", 404)
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


class TestDiagnose:
    def post(self, client: httpx.Client, status: int = 200, **parts: Any) -> str:
        answer = client.post("/diagnose", headers=PAGE, **parts)
        assert answer.status_code == status, answer.text
        return answer.text

    def test_a_log_is_answered_with_the_line_and_two_on_either_side(self, client: httpx.Client) -> None:
        html = self.post(client, files={"log": ("train.log", LOG)})
        assert 'href="/entries/broken-thing"' in html
        shown = re.search(r"train.log, lines 2 to 6.*?</ol>", html, re.DOTALL)
        assert shown
        assert [text_of(row) for row in re.findall(r"<li>(.*?)</li>", shown[0])] == [
            *("epoch 2", "about to break", "the thing broke: code 42", "epoch 3", "epoch 4")
        ]
        assert "<mark>the thing broke: code 42</mark>" in html
        assert "kb verify broken-thing" in html

    def test_pasted_text_is_a_log(self, client: httpx.Client) -> None:
        html = self.post(client, files={"log": ("", b""), "text": (None, LOG)})
        assert "<mark>the thing broke: code 42</mark>" in html

    def test_several_logs_are_told_apart_although_they_are_called_alike(self, client: httpx.Client) -> None:
        html = self.post(client, files=[("log", ("train.log", LOG)), ("log", ("train.log", b"[rank3]: " + LOG[38:]))])
        assert "train.log (2)" in html

    def test_a_compressed_log_is_read_and_its_lines_are_shown(self, client: httpx.Client) -> None:
        import gzip

        assert "<mark>the thing broke" in self.post(client, files={"log": ("train.log.gz", gzip.compress(LOG))})

    def test_a_log_is_data_wherever_it_is_shown(self, client: httpx.Client) -> None:
        hostile = b"<script>alert(1)</script>\nthe thing broke: code 1 <img src=x onerror=alert(1)>\n{{7*7}}\n"
        html = self.post(client, files={"log": ("<b>.log", hostile)})
        assert "<script>alert" not in html and "<img" not in html and "<b>" not in html
        assert "{{7*7}}" in html

    def test_a_healthy_log_is_not_called_unexplained(self, client: httpx.Client) -> None:
        assert "Nothing failed here" in self.post(client, files={"log": ("train.log", b"epoch 1\nepoch 2\n")})

    def test_an_unexplained_log_shows_what_failed_and_is_counted(self, client: httpx.Client, app: FastAPI) -> None:
        html = self.post(client, files={"log": ("train.log", b"epoch 1\nRuntimeError: the flux capacitor is empty\n")})
        assert "No entry explains this" in html
        assert "flux capacitor" in html
        wait_for(lambda: gaps.page(app.state.database), "the gap to be written")

    @pytest.mark.parametrize("parts", [{"files": {"log": ("", b"")}}, {"data": {"text": "x"}}, {}])
    def test_no_log_at_all_is_said_on_the_page(self, client: httpx.Client, parts: dict[str, Any]) -> None:
        assert "choose a log" in self.post(client, 422, **parts)

    def test_a_broken_form_is_no_error_of_ours(self, client: httpx.Client) -> None:
        headers = {**PAGE, "Content-Type": "multipart/form-data; boundary=x"}
        assert client.post("/diagnose", headers=headers, content=b"--x\r\nnonsense").status_code in (400, 422)
        headers["Content-Type"] = "multipart/form-data"
        assert client.post("/diagnose", headers=headers, content=b"--x\r\n").status_code == 400

    def test_nothing_of_a_log_touches_the_disk(self, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a file was made")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # what a spooled file becomes when it grows
        html = self.post(client, files={"log": ("train.log", LOG + b"epoch\n" * 1_000_000)})
        assert "<mark>the thing broke: code 42</mark>" in html

    def test_a_log_beyond_the_limit_is_refused(self, client: httpx.Client) -> None:
        self.post(client, 413, files={"log": ("train.log", b"x" * (33 << 20))})


class TestFeedback:
    def test_a_form_says_whether_an_entry_helped(self, client: httpx.Client, app: FastAPI) -> None:
        given = {"helped": "yes", "gpu": "H100", "comment": "worked at once"}
        answer = client.post("/entries/broken-thing/feedback", data=given, headers=PAGE)
        assert (answer.status_code, answer.headers["location"]) == (303, "/entries/broken-thing?told=yes#feedback")
        assert feedback.counts(app.state.database) == [("broken-thing", "H100", 1, 0)]
        assert "Thank you" in get(client, answer.headers["location"])

    def test_an_unknown_entry_gets_none(self, client: httpx.Client) -> None:
        assert client.post("/entries/nothing/feedback", data={"helped": "yes"}, headers=PAGE).status_code == 404

    @pytest.mark.parametrize("given", [{}, {"helped": "perhaps"}, {"helped": "no", "comment": "x" * 501}])
    def test_what_makes_no_sense_is_refused(self, client: httpx.Client, given: dict[str, str]) -> None:
        assert client.post("/entries/broken-thing/feedback", data=given, headers=PAGE).status_code == 422

    def test_a_page_of_another_site_cannot_send_it(self, client: httpx.Client, app: FastAPI) -> None:
        headers = {**PAGE, "Origin": "https://example.org", "Sec-Fetch-Site": "cross-site"}
        answer = client.post("/entries/broken-thing/feedback", data={"helped": "no"}, headers=headers)
        assert answer.status_code == 403
        assert feedback.counts(app.state.database) == []


class TestGaps:
    def test_gaps_are_listed_most_frequent_first_and_are_data(self, client: httpx.Client, app: FastAPI) -> None:
        hostile = "<script>alert(1)</script>"
        gaps.add(
            app.state.database, [("search", hostile, "slow-disk"), ("search", "rare", ""), ("search", hostile, "")]
        )
        html = get(client, "/gaps")
        assert html.index("&lt;script&gt;") < html.index("rare")
        assert "<script>alert" not in html

    def test_there_are_pages_of_them(self, client: httpx.Client, app: FastAPI) -> None:
        gaps.add(app.state.database, [("search", f"question {number}", "") for number in range(60)])
        first = get(client, "/gaps")
        following = re.search(r'href="(/gaps\?after=[^"]+)"', first)
        assert following
        second = get(client, following[1])
        asked = re.compile(r"question \d+")
        assert len(asked.findall(first)) == 50
        assert len(set(asked.findall(first)) | set(asked.findall(second))) == 60


class TestSignIn:
    def test_without_a_key_a_page_leads_to_the_sign_in(self, client: httpx.Client) -> None:
        answer = client.get("/gaps", headers={**PAGE, "X-Forwarded-For": "10.1.2.3"})
        assert answer.status_code == 401
        assert 'href="/sign-in?to=%2Fgaps"' in answer.text

    def test_a_key_lets_a_browser_in_until_it_signs_out(
        self, client: httpx.Client, signed: Callable[[Scope], str]
    ) -> None:
        through = {**PAGE, "X-Forwarded-For": "10.1.2.3", "Sec-Fetch-Site": "same-origin"}
        answer = client.post("/sign-in", data={"key": signed(Scope.READ), "to": "/gaps"}, headers=through)
        assert (answer.status_code, answer.headers["location"]) == (303, "/gaps")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        assert "Sign out" in client.get("/gaps", headers=through).text
        assert client.post("/sign-out", headers=through).status_code == 303
        assert client.get("/gaps", headers=through).status_code == 401

    def test_a_wrong_key_is_said_on_the_page(self, client: httpx.Client) -> None:
        answer = client.post("/sign-in", data={"key": "kb_abcdefgh_" + "x" * 43}, headers=PAGE)
        assert answer.status_code == 401
        assert "not accepted" in answer.text
        assert "set-cookie" not in answer.headers

    @pytest.mark.parametrize("to", ["https://example.org/", "//example.org", "/\\example.org", "/\t/example.org", ""])
    def test_nobody_is_led_to_another_site(self, client: httpx.Client, signed: Callable[[Scope], str], to: str) -> None:
        answer = client.post("/sign-in", data={"key": signed(Scope.READ), "to": to}, headers=PAGE)
        assert answer.headers["location"] == "/"


def test_content_without_any_link_between_entries_has_a_graph_page(client: httpx.Client) -> None:
    html = get(client, "/graph")
    assert "Not linked to another incident" in html
    assert "<svg" not in html


def test_reports_make_the_table_of_an_entry(app: FastAPI, entries: ContentRoot, serve: Any) -> None:
    from shown import report

    from kb.store import reports

    database: Database = app.state.database
    database.prepare()
    for number, is_current in enumerate((True, True, False)):
        given = {**report("f" * 64, ["NVIDIA H100"], "570.1", "2.7.1", "verified", "hardware", is_current)}
        given |= {"id": "broken-thing"}
        reports.admit(database, given, "node", f"key-{number}", f"{number}")
    with serve(app) as client:
        app.state.loading.result(60)
        wait_for(lambda: app.state.snapshot.standings, "the reports to be counted")
        html = get(client, "/entries/broken-thing")
    rows = [text_of(row) for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)[1:]]
    assert len(rows) == 2
    assert all("H100 verified" in row and "earlier wording" in row for row in rows)

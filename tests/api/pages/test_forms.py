"""What people tell the pages: feedback, keys; and the gaps that their questions left."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI

from kb.store import feedback, gaps, keys
from kb.store.keys import Scope
from tests.support.page_reader import PAGE, get

pytest_plugins = ["tests.support.app_fixtures"]


@pytest.fixture
def signed(app: FastAPI, client: httpx.Client) -> Callable[[Scope], str]:
    """Makes keys that the service knows of."""

    def make(scope: Scope) -> str:
        text = keys.new(app.state.database, "test", scope)[1]
        app.state.snapshot.refresh()
        return text

    return make


def test_a_form_says_whether_an_entry_helped(client: httpx.Client, app: FastAPI) -> None:
    given = {"helped": "yes", "gpu": "H100", "comment": "worked at once"}
    answer = client.post("/entries/broken-thing/feedback", data=given, headers=PAGE)
    assert (answer.status_code, answer.headers["location"]) == (303, "/entries/broken-thing?helped=yes#feedback")
    assert feedback.counts(app.state.database) == [("broken-thing", "H100", 1, 0)]
    assert "Thank you" in get(client, answer.headers["location"])


def test_an_unknown_entry_gets_none(client: httpx.Client) -> None:
    assert client.post("/entries/nothing/feedback", data={"helped": "yes"}, headers=PAGE).status_code == 404


@pytest.mark.parametrize("given", [{}, {"helped": "perhaps"}, {"helped": "no", "comment": "x" * 501}])
def test_what_makes_no_sense_is_refused(client: httpx.Client, given: dict[str, str]) -> None:
    assert client.post("/entries/broken-thing/feedback", data=given, headers=PAGE).status_code == 422


def test_a_page_of_another_site_cannot_send_it(client: httpx.Client, app: FastAPI) -> None:
    headers = {**PAGE, "Origin": "https://example.org", "Sec-Fetch-Site": "cross-site"}
    answer = client.post("/entries/broken-thing/feedback", data={"helped": "no"}, headers=headers)
    assert answer.status_code == 403
    assert feedback.counts(app.state.database) == []


def test_gaps_are_listed_most_frequent_first_and_are_data(client: httpx.Client, app: FastAPI) -> None:
    hostile = "<script>alert(1)</script>"
    gaps.add(app.state.database, [("search", hostile, "slow-disk"), ("search", "rare", ""), ("search", hostile, "")])
    html = get(client, "/gaps")
    assert html.index("&lt;script&gt;") < html.index("rare")
    assert "<script>alert" not in html


def test_there_are_pages_of_them(client: httpx.Client, app: FastAPI) -> None:
    gaps.add(app.state.database, [("search", f"question {number}", "") for number in range(60)])
    first = get(client, "/gaps")
    following = re.search(r'href="(/gaps\?after=[^"]+)"', first)
    assert following
    second = get(client, following[1])
    asked = re.compile(r"question \d+")
    assert len(asked.findall(first)) == 50
    assert len(set(asked.findall(first)) | set(asked.findall(second))) == 60


def test_without_a_key_a_page_leads_to_the_sign_in(client: httpx.Client) -> None:
    answer = client.get("/gaps", headers={**PAGE, "X-Forwarded-For": "10.1.2.3"})
    assert answer.status_code == 401
    assert 'href="/sign-in?to=%2Fgaps"' in answer.text
    assert "set-cookie" not in answer.headers  # whose browser has a key that it did not send keeps it
    asked = client.get("/?q=a+thing&gpu=H100", headers={**PAGE, "X-Forwarded-For": "10.1.2.3"})
    assert 'href="/sign-in?to=%2F%3Fq%3Da%2Bthing%26gpu%3DH100"' in asked.text


def test_a_key_that_is_not_accepted_any_more_is_taken_from_the_browser(client: httpx.Client) -> None:
    client.cookies.set("kb_key", "kb_abcdefgh_" + "x" * 43)
    answer = client.get("/gaps", headers=PAGE)
    assert answer.status_code == 401
    assert "Max-Age=0" in answer.headers["set-cookie"]


def test_a_key_lets_a_browser_in_until_it_signs_out(client: httpx.Client, signed: Callable[[Scope], str]) -> None:
    through = {**PAGE, "X-Forwarded-For": "10.1.2.3", "Sec-Fetch-Site": "same-origin"}
    answer = client.post("/sign-in", data={"key": signed(Scope.READ), "to": "/gaps"}, headers=through)
    assert (answer.status_code, answer.headers["location"]) == (303, "/gaps")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower()
    assert "Sign out" in client.get("/gaps", headers=through).text
    assert client.post("/sign-out", headers=through).status_code == 303
    assert client.get("/gaps", headers=through).status_code == 401


def test_a_wrong_key_is_said_on_the_page(client: httpx.Client) -> None:
    answer = client.post("/sign-in", data={"key": "kb_abcdefgh_" + "x" * 43}, headers=PAGE)
    assert answer.status_code == 401
    assert "not accepted" in answer.text
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("to", ["https://example.org/", "//example.org", "/\\example.org", "/\t/example.org", ""])
def test_nobody_is_led_to_another_site(client: httpx.Client, signed: Callable[[Scope], str], to: str) -> None:
    answer = client.post("/sign-in", data={"key": signed(Scope.READ), "to": to}, headers=PAGE)
    assert answer.headers["location"] == "/"

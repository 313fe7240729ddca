"""The page that takes a log: what it shows of it, and that it keeps nothing."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.evidence import DERIVED_PREFIX, Line
from kb.store import gaps
from tests.support.console import ContentRoot, wait_for, wait_until_ready
from tests.support.page_reader import PAGE, text_of

pytest_plugins = ["tests.support.app_fixtures"]

Make = Callable[..., FastAPI]
Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
excerpt: Any = resolve_name("kb.api.pages.excerpt")
log_form: Any = resolve_name("kb.api.pages.log_form")

LOG = b"epoch 1\nepoch 2\nabout to break\nthe thing broke: code 42\nepoch 3\nepoch 4\nepoch 5\n"


def post(client: httpx.Client, status: int = 200, **parts: Any) -> str:
    answer = client.post("/diagnose", headers=PAGE, **parts)
    assert answer.status_code == status, answer.text
    return answer.text


def test_a_log_is_answered_with_the_line_and_two_on_either_side(client: httpx.Client) -> None:
    html = post(client, files={"log": ("train.log", LOG)})
    assert 'href="/entries/broken-thing"' in html
    shown = re.search(r"train.log</span>, lines 2 to 6.*?</ol>", html, re.DOTALL)
    assert shown
    assert [text_of(row) for row in re.findall(r"<li>(.*?)</li>", shown[0])] == [
        *("epoch 2", "about to break", "the thing broke: code 42", "epoch 3", "epoch 4")
    ]
    assert "<mark>the thing broke: code 42</mark>" in html
    assert "kb verify broken-thing" in html


def test_pasted_text_is_a_log(client: httpx.Client) -> None:
    html = post(client, files={"log": ("", b""), "text": (None, LOG)})
    assert "<mark>the thing broke: code 42</mark>" in html


def test_several_logs_are_told_apart_although_they_are_called_alike(client: httpx.Client) -> None:
    html = post(
        client, files=[("log", ("train.log", LOG)), ("log", ("train.log", b"[rank3]: the thing broke: code 43\n"))]
    )
    assert "train.log (2)" in html


def test_no_log_is_called_as_another_was_renamed(client: httpx.Client) -> None:
    html = post(client, files=[("log", (name, LOG)) for name in ("a", "a", "a (2)")])
    assert all(f"{name}</span>, lines 2 to 6" in html for name in ("a", "a (2)", "a (2) (2)"))


LINES = st.lists(st.text("ab", max_size=12).map(str.encode), max_size=12)


@given(LINES, st.sets(st.integers(-2, 14)), st.integers(1, 20), st.booleans())
def test_lines_are_found_again_wherever_pieces_of_a_log_end(
    lines: list[bytes], wanted: set[int], piece: int, ends_with_a_line: bool
) -> None:
    data = b"\n".join(lines) + (b"\n" if ends_with_a_line else b"")
    cited = [Line("log", number, "") for number in wanted if number]
    with patch.object(excerpt, "PIECE", piece), patch.object(excerpt, "AROUND", 0):
        result = excerpt.texts([log_form.UploadedLog("log", data)], cited)
    plain = {number: text for number, text in enumerate(data.split(b"\n"), 1) if text or number <= data.count(b"\n")}
    assert result == {
        ("log", number): plain[number].decode().rstrip() for number in wanted & plain.keys() if number > 0
    }


def test_a_compressed_log_is_read_and_its_lines_are_shown(client: httpx.Client) -> None:
    assert "<mark>the thing broke" in post(client, files={"log": ("train.log.gz", gzip.compress(LOG))})


def test_packed_logs_together_grow_no_further_than_one_alone(client: httpx.Client) -> None:
    bomb = gzip.compress(LOG) + gzip.compress(b"epoch 6\n" * (1 << 18)) * 300
    html = post(client, files=[("log", ("one.gz", bomb)), ("log", ("two.gz", bomb))])
    assert "<mark>the thing broke" in html
    for name in ("one.gz", "two.gz"):
        assert f"{name}: unpacked, it is larger than 268,435,456 bytes" in html


def test_a_log_is_data_wherever_it_is_shown(client: httpx.Client) -> None:
    hostile = b"<script>alert(1)</script>\nthe thing broke: code 1 <img src=x onerror=alert(1)>\n{{7*7}}\n"
    html = post(client, files={"log": ("<b>.log", hostile)})
    assert "<script>alert" not in html and "<img" not in html and "<b>" not in html
    assert "{{7*7}}" in html


def test_what_failed_first_stands_above_what_followed(serve: Serve, make_app: Make, entries: ContentRoot) -> None:
    for path in (entries.path / "entries").glob("*.md"):
        path.write_text(path.read_text().replace("role: root", "role: cascade"))
    log = b"[rank3]: acme.ShardError: <b>odd</b>\n[rank0]: the thing broke: code 42\n"
    app = make_app()
    with serve(app) as client:
        wait_until_ready(app)
        html = post(client, files={"log": ("a`<b>.log", log)})
    first, followed = html.index("failed first</strong>"), html.index("Weaker candidates")
    assert "Rank 3" in html[:first]
    assert "acme.ShardError: &lt;b&gt;odd" in html[first:followed]
    assert "No confident match</h2>" in html
    assert "What explains it" not in html
    assert "<b>" not in html


def test_a_sentence_of_ours_is_no_line_of_the_log() -> None:
    ours, theirs = Line("log", 2, f"{DERIVED_PREFIX}rank 3 did not come"), Line("log", 2, "it broke")
    result = excerpt.excerpts([ours, theirs], {("log", 2): "it broke"})
    assert [[(row.number, row.text) for row in item.rows] for item in result] == [
        [(0, "rank 3 did not come")],
        [(2, "it broke")],
    ]


def test_a_healthy_log_is_not_called_unexplained(client: httpx.Client) -> None:
    assert "No error was printed" in post(client, files={"log": ("train.log", b"epoch 1\nepoch 2\n")})


def test_an_unexplained_log_shows_what_failed_and_is_counted(client: httpx.Client, app: FastAPI) -> None:
    html = post(client, files={"log": ("train.log", b"epoch 1\n[rank0]: RuntimeError: the flux capacitor is empty\n")})
    assert "No confident match" in html
    assert "flux capacitor" in html
    assert 'aria-label="What to look at"' in html
    wait_for(lambda: gaps.page(app.state.database), "the gap to be written")


def test_an_upload_that_is_not_text_is_named_and_not_called_healthy(client: httpx.Client) -> None:
    html = post(client, files=[("log", ("model.bin", b"\x7fELF\0")), ("log", ("data.zip", b"PK\x03\x04\0"))])
    assert "Nothing here could be read" in html and "No error was printed" not in html
    assert "model.bin: is binary and was not read" in html and "data.zip: is binary" in html


def test_a_log_beside_a_binary_is_diagnosed_and_the_binary_is_named(client: httpx.Client) -> None:
    html = post(client, files=[("log", ("model.bin", b"\x7fELF\0")), ("log", ("train.log", LOG))])
    assert "model.bin: is binary and was not read" in html
    assert "<mark>the thing broke: code 42</mark>" in html


@pytest.mark.parametrize("parts", [{"files": {"log": ("", b"")}}, {"data": {"text": "x"}}, {}])
def test_no_log_at_all_is_said_on_the_page(client: httpx.Client, parts: dict[str, Any]) -> None:
    assert "choose a log" in post(client, 422, **parts)


def test_a_broken_form_is_no_error_of_ours(client: httpx.Client) -> None:
    headers = {**PAGE, "Content-Type": "multipart/form-data; boundary=x"}
    assert client.post("/diagnose", headers=headers, content=b"--x\r\nnonsense").status_code in (400, 422)
    headers["Content-Type"] = "multipart/form-data"
    assert client.post("/diagnose", headers=headers, content=b"--x\r\n").status_code == 400


def test_nothing_of_a_log_touches_the_disk(client: httpx.Client, written: list[str]) -> None:
    written.clear()
    html = post(client, files={"log": ("train.log", LOG + b"epoch\n" * 1_000_000)})
    assert "<mark>the thing broke: code 42</mark>" in html
    assert written == []


def test_a_log_beyond_the_limit_is_refused(client: httpx.Client) -> None:
    post(client, 413, files={"log": ("train.log", b"x" * (33 << 20))})

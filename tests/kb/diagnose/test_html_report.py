"""The diagnosis as one HTML file: self-contained, without scripts, and without the secrets of the log."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.html_report import html_report
from tests.support.job_logs import SHM

VOID = {"meta"}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\"'&"
TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where tags are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def raises(rank: int, error: str, file: str = "/work/t.py") -> str:
    lines = ["Traceback (most recent call last):", f'  File "{file}", line 44, in save', "    f()", error]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def steps(rank: int, words: str = "step {} loss 1.{}") -> str:
    return "".join(f"[rank{rank}]: {words.format(step, step)}\n" for step in range(1, 9))


LOGS = {
    "explained": steps(0) + steps(1) + f"[rank1]: {SHM.format(rank=1)}\n",
    "unknown": steps(0) + steps(1) + raises(1, "FluxError: the capacitor is off"),
    "healthy": steps(0) + steps(1),
    "empty": "",
    "hostile": steps(0, HOSTILE + " step {} {}") + raises(1, f"FluxError: {HOSTILE}", f"/work/{HOSTILE[:-3]}.py"),
}


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_it_is_one_file_without_script_and_network(answer: Callable[..., Diagnosis], log: str) -> None:
    html = html_report(answer(log))
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert not {"script", "img", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "action", "style", "srcset", "xlink:href"} & names
    assert not [name for name in names if name.startswith("on")]
    style = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert "url(" not in style and "@import" not in style
    assert [value for _, value in page.attributes if "//" in value] in (
        [],
        ["http://www.w3.org/2000/svg"],  # a name, which nothing loads
    )


def test_what_an_entry_explains_is_told_with_its_line_and_fix(answer: Callable[..., Diagnosis]) -> None:
    diagnosis = answer(LOGS["explained"])
    text = Page(html_report(diagnosis)).text
    assert diagnosis.brief.entry == "shm-too-small"
    assert diagnosis.brief.title in text
    assert diagnosis.brief.fix in text
    assert "0.log:17 rank 1" in text
    assert "Findings" in text


def test_what_nobody_knows_is_called_unknown(answer: Callable[..., Diagnosis]) -> None:
    text = Page(html_report(answer(LOGS["unknown"]))).text
    assert "unknown: no entry explains it" in text
    assert "rank 1 raised FluxError: the capacitor is off in t.py:44 save" in text


def test_a_healthy_log_is_called_so(answer: Callable[..., Diagnosis]) -> None:
    text = Page(html_report(answer(LOGS["healthy"]))).text
    assert "no line reports a failure" in text
    assert "unknown" not in text


def test_the_picture_has_a_text_version(answer: Callable[..., Diagnosis]) -> None:
    page = Page(html_report(answer(LOGS["unknown"])))
    assert page.tags.count("svg") == 1
    assert page.tags.count("tr") == 3, "a head and two ranks"
    assert "What each rank did" in page.text
    assert "train step 8" in page.text


def test_attempts_are_numbered(answer: Callable[..., Diagnosis]) -> None:
    log = steps(0) + "Restarting worker group\n" + steps(0) + raises(0, "FluxError: off")
    text = Page(html_report(answer(log))).text
    assert "Attempt 1 of 2" in text
    assert "Attempt 2 of 2" in text


def test_markup_and_control_characters_of_a_log_are_text(answer: Callable[..., Diagnosis]) -> None:
    html = html_report(answer(LOGS["hostile"]))
    assert "\x1b" not in html
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_secrets_in_lines_are_redacted(answer: Callable[..., Diagnosis]) -> None:
    log = steps(0) + f"[rank0]: ERROR: login failed with HF_TOKEN={TOKEN}\n" + raises(1, "FluxError: off")
    assert TOKEN not in html_report(answer(log))


def test_secrets_in_the_picture_are_redacted(answer: Callable[..., Diagnosis]) -> None:
    html = html_report(answer(steps(0) + raises(1, f"FluxError: login with token {TOKEN}")))
    assert TOKEN not in html[html.index("</svg>") :]
    assert TOKEN not in html

"""Pages in Chinese: nothing of ours stays English, and the table of texts has no more than what is printed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kb.content.area import Area
from kb.content.entry import Severity, Status
from kb.content.grades import Grade
from kb.content.html import section_html
from kb.errors import EVERY_ID
from kb.probe import FIDELITIES
from kb.records.hardware import NEVER
from kb.store import gaps
from kb.verify.verdict import Verdict
from tests.support.console import CHECKOUT
from tests.support.page_reader import PAGE, get

pytest_plugins = ["tests.support.app_fixtures"]

translation: Any = resolve_name("kb.api.pages.translation")
page: Any = resolve_name("kb.api.pages.page")
diagnose_page: Any = resolve_name("kb.api.pages.diagnose_page")

TERMS = {"kb", "GPU", "torch", "rank", "API", "CPU", "probe", "ALLGATHER", "timeout", "save"}
CHINESE = re.compile("[\u3400-\u9fff]")
MARK = re.compile(r"\[\w+( \d+)?\]")  # how a claim is known
SKIPPED = {"code", "pre", "kbd", "svg", "script", "style", "textarea"}
VOID = {"meta", "link", "input", "br", "hr", "img"}
ATTRIBUTES = ("aria-label", "title", "placeholder", "data-announcement")
LOGS = {
    "known": b"epoch 1\nthe thing broke: code 42\n",
    "unknown": b"epoch 1\n[rank1]: acme.ShardError: no index\n",
    "healthy": b"epoch 1\n",
    "binary": b"\x7fELF\0\0",
}


class Labels(HTMLParser):
    """The texts and the labels of a page that are not marked as being in another language."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self._stack: list[bool] = [True]  # whether what is inside is Chinese text of ours
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        is_ours = self._stack[-1] and tag not in SKIPPED and given.get("lang", "zh-CN") == "zh-CN"
        is_example = tag == "input" and given.get("name") in ("gpu", "torch", "key", "q")
        if is_ours:
            names = (name for name in ATTRIBUTES if not (is_example and name == "placeholder"))
            self.texts += [given[name] or "" for name in names if name in given]
        if tag not in VOID:
            self._stack.append(is_ours)

    def handle_endtag(self, _: str) -> None:
        self._stack.pop()

    def handle_data(self, data: str) -> None:
        if self._stack[-1]:
            self.texts.append(data)


def untranslated(html: str) -> list[str]:
    """Labels in Latin letters alone, besides terms of the field."""
    assert '<html lang="zh-CN">' in html
    return [
        text.strip()
        for text in Labels(html).texts
        if not CHINESE.search(text) and set(re.findall(r"[A-Za-z]{2,}", MARK.sub("", text))) - TERMS
    ]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/?lang=zh", 200),
        ("/?lang=zh&q=the+thing+broke:+code+99", 200),
        ("/?lang=zh&q=zebra+crossing&area=data", 200),
        ("/?lang=zh&tag=storage&area=hardware", 200),
        ("/?lang=zh&q=disk&tag=storag", 422),
        ("/entries/broken-thing?lang=zh", 200),
        ("/entries/broken-thing?lang=zh&helped=yes", 200),
        ("/entries/old-thing?lang=zh", 200),
        ("/entries/broken-thin?lang=zh", 404),
        ("/nowhere?lang=zh", 404),
        ("/diagnose?lang=zh", 200),
        ("/graph?lang=zh", 200),
        ("/graph?lang=zh&q=disk", 200),
        ("/gaps?lang=zh", 200),
        ("/docs?lang=zh", 200),
        ("/sign-in?lang=zh", 200),
    ],
)
def test_a_chinese_page_has_no_label_in_english(client: httpx.Client, app: FastAPI, path: str, status: int) -> None:
    gaps.add(app.state.database, [("search", "why", "slow-disk"), ("diagnose", "it broke", "")])
    question = httpx.URL(path).params.get("q", "")
    assert untranslated(get(client, path, status).replace(question, "")) == []


@pytest.mark.parametrize("log", LOGS)
def test_a_chinese_diagnosis_has_no_label_in_english(client: httpx.Client, log: str) -> None:
    answer = client.post("/diagnose?lang=zh", headers=PAGE, files={"log": ("1.log", LOGS[log])})
    assert untranslated(answer.text.replace("1.log", "")) == []


def test_an_english_page_has_no_chinese_but_what_is_marked(client: httpx.Client) -> None:
    html = get(client, "/entries/broken-thing")
    assert '<html lang="en">' in html
    unmarked = [part for part in re.findall(r"<[^>]*>[^<]*", html) if CHINESE.search(part)]
    assert unmarked and all("zh-CN" in part for part in unmarked)


def test_a_language_that_was_chosen_stays_when_one_follows_a_link(client: httpx.Client) -> None:
    for path in ("/?lang=zh", "/?lang=zh&q=disk", "/entries/slow-disk?lang=zh", "/gaps?lang=zh", "/graph?lang=zh"):
        addresses = re.findall(r'<a[^>]* href="(/[^"#]*)', get(client, path))
        assert all("lang=" in address for address in addresses), addresses
    assert "lang=" not in re.sub(r'<a class="language"[^>]*>', "", get(client, "/gaps")).replace('lang="', "")


def test_the_other_language_keeps_the_question(client: httpx.Client) -> None:
    assert 'href="/?q=the+disk&amp;area=hardware&amp;lang=zh"' in get(client, "/?q=the+disk&area=hardware")


def test_a_caption_of_ours_within_an_english_section_is_in_chinese() -> None:
    html = section_html("```log look-alike\nit broke\n```", lambda _: "")
    assert "相似故障" in translation.captioned(html, "zh")
    assert translation.captioned(html, "en") == html


def test_a_day_is_written_as_its_language_does() -> None:
    assert translation.day("2026-11-03T08:00:00Z", "en") == "2026-11-03"
    assert translation.day("2026-11-03T08:00:00Z", "zh") == "2026年11月3日"
    assert translation.day("", "zh") == ""


def messages() -> Iterator[str]:
    environment = page.TEMPLATES["en"]
    for template in (CHECKOUT / "api/pages/templates").glob("*.html"):
        for _, _, message in environment.extract_translations(template.read_text(encoding="utf-8")):
            yield message if isinstance(message, str) else [part for part in message if part][-1]


def test_every_message_of_the_templates_is_translated_and_nothing_else() -> None:
    assert set(messages()) == set(translation.TEXTS)


def test_a_translation_has_the_values_and_the_markup_of_its_message() -> None:
    part = re.compile(r"%\(\w+\)s|<[^>]+>")
    for english, chinese in translation.TEXTS.items():
        assert sorted(part.findall(english)) == sorted(part.findall(chinese)), english
    for english, chinese in translation.SENTENCES.items():
        chinese.format(*re.findall(r"\{\}", english))


def test_every_value_of_a_closed_list_has_a_label() -> None:
    roles = [text for role in diagnose_page.ROLES.values() for text in role]
    values = {*Status, *Severity, *Verdict, *Grade, *FIDELITIES, *Area, *(area.meaning for area in Area), *roles}
    assert set(map(str, values)) - translation.LABELS.keys() == set()


def strings(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(item, ast.Constant) and isinstance(item.value, str):
                yield item.value


def test_every_sentence_is_one_that_the_core_or_the_service_prints() -> None:
    printed = "\n".join((*strings(CHECKOUT / "kb"), *strings(CHECKOUT / "api")))
    pieces = {
        piece
        for sentence in translation.SENTENCES
        for piece in re.split(r"\{\}|; |: |, and |, |(?<=\.) ", sentence)
        if len(piece) > 9
    }
    assert {piece for piece in pieces if piece.strip(" ,.") not in printed} == set()


def test_what_every_reader_meets_is_translated() -> None:
    for english in (EVERY_ID, NEVER):
        assert CHINESE.search(str(translation.sentence(english, "zh"))), english


def test_a_sentence_without_translation_is_marked_as_english() -> None:
    assert translation.sentence("<b> never seen", "zh") == '<span lang="en">&lt;b&gt; never seen</span>'
    assert translation.sentence("nearest: a, b", "zh") == "最接近的是：a, b"

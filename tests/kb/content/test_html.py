"""Markdown of entries as HTML: what becomes of it, and what never comes through."""

from __future__ import annotations

from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest

from kb.content.html import section_html


class Elements(HTMLParser):
    """The names of elements and attributes in some HTML, and the addresses that it leads to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses += [value or "" for name, value in attrs if name == "href"]


def no_entry(_: str) -> str:
    return ""


def test_marks_lead_to_the_references() -> None:
    html = section_html("It waits. [probe] [thread 3]", no_entry)
    assert '<span class="grade">[probe]</span>' in html
    assert '<a class="grade" href="#ref-3"' in html


def test_a_mark_in_code_stays_code() -> None:
    assert "<code>[thread 3]</code>" in section_html("`[thread 3]`", no_entry)
    assert "grade" not in section_html("```\n[thread 3]\n```", no_entry)


def test_the_id_of_an_entry_leads_to_it_and_other_code_does_not() -> None:
    pages = {"slow-rank": "/entries/slow-rank"}
    html = section_html("See `slow-rank`, not `all-reduce`.", lambda item: pages.get(item, ""))
    assert '<a href="/entries/slow-rank"' in html
    assert html.count("<a ") == 1


def test_the_log_of_another_incident_says_so() -> None:
    html = section_html("```log look-alike\nkilled\n```\n\n```log\nhung\n```", no_entry)
    assert html.count("<figure") == 1
    assert "Not this incident" in html.partition("killed")[0]


def test_tables_and_nested_lists_are_rendered() -> None:
    html = section_html("| a | b |\n| --- | --- |\n| 1 | 2 |\n\n1. one\n\n   - two\n", no_entry)
    assert "<td>2</td>" in html
    assert "<ol>" in html and "<ul>" in html


@pytest.mark.parametrize(
    "hostile",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<svg onload=alert(1)><a xlink:href='javascript:alert(1)'>x</a></svg>",
        "<iframe src='https://example.org'></iframe>",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](data:text/html;base64,PHNjcmlwdD4=)",
        "[x](vbscript:x)",
        "<javascript:alert(1)>",
        "![x](https://example.org/pixel.png)",
        '[x](https://example.org "a\\" onmouseover=alert(1) x=\\"")',
        '```"><script>alert(1)</script>\nx\n```',
        "`</code><script>alert(1)</script>`",
        "[a]\n\n[a]: javascript:alert(1)",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "&#60;script&#62;alert(1)&#60;/script&#62;",
    ],
)
def test_nothing_hostile_comes_through(hostile: str) -> None:
    result = Elements(section_html(hostile, no_entry))
    assert result.names <= {"p", "a", "pre", "code"}
    assert result.attributes <= {"href", "title", "rel"}
    assert all(urlsplit(address).scheme in ("", "http", "https") for address in result.addresses)

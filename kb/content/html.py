"""The Markdown of an entry as safe HTML: no raw HTML, no scripts, only http and https addresses.

Grade marks link to the references on the page, ids of entries link to their pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from typing import Any

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token

from kb.content.grades import MARK
from kb.content.parser import markdown_parser

Address = Callable[[str], str]

MAYBE_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+")
LOOK_ALIKE = "Not this incident: the log of a look-alike"

TEXT = {"a", "br", "code", "em", "span", "strong"}
BLOCKS = {"blockquote", "figcaption", "figure", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "ul"}
TABLE = {"table", "tbody", "td", "th", "thead", "tr"}
ATTRIBUTES = {"a": {"href", "title"}, "ol": {"start"}}
CLASSES = {"a": {"grade"}, "span": {"grade"}, "figure": {"look-alike"}}
SCHEMES = {"http", "https"}


def section_html(text: str, address: Address) -> str:
    """The HTML of one section. `address` returns the page of an entry id, or "" if the word is not an id."""
    parser = _parser()
    env: dict[str, Any] = {}
    tokens = list(_with_captions(parser.parse(text, env)))
    for token in tokens:
        if token.children:
            token.children = [inline for child in token.children for inline in _with_links(child, address)]
    return sanitized(parser.renderer.render(tokens, parser.options, env))


def sanitized(html: str) -> str:
    """The HTML, reduced to the elements of Markdown and the classes of this module."""
    return nh3.clean(
        html,
        tags=TEXT | BLOCKS | TABLE,
        attributes=ATTRIBUTES,
        allowed_classes=CLASSES,
        url_schemes=SCHEMES,
        link_rel="noopener nofollow",
    )


@cache
def _parser() -> MarkdownIt:
    return markdown_parser()


def _with_captions(tokens: list[Token]) -> Iterator[Token]:
    """The tokens, with each look-alike log inside a figure that has a caption."""
    for token in tokens:
        if token.type == "fence" and "look-alike" in token.info.split():
            yield _html(f'<figure class="look-alike"><figcaption>{LOOK_ALIKE}</figcaption>', "html_block")
            yield token
            yield _html("</figure>", "html_block")
        else:
            yield token


def _with_links(token: Token, address: Address) -> Iterator[Token]:
    """A part of a line, with links for its marks and ids."""
    if token.type == "text":
        yield from _with_linked_marks(token.content)
    elif token.type == "code_inline" and MAYBE_ID.fullmatch(token.content) and (url := address(token.content)):
        yield _html(f'<a href="{escape(url)}">')
        yield token
        yield _html("</a>")
    else:
        yield token


def _with_linked_marks(text: str) -> Iterator[Token]:
    end = 0
    for mark in MARK.finditer(text):
        yield _text(text[end : mark.start()])
        to_reference = f'<a class="grade" href="#ref-{mark["number"]}">{mark[0]}</a>'
        yield _html(to_reference if mark["number"] else f'<span class="grade">{mark[0]}</span>')
        end = mark.end()
    yield _text(text[end:])


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)


def _html(content: str, kind: str = "html_inline") -> Token:
    return Token(kind, "", 0, content=content)

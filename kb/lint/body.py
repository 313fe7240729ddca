"""The body of an entry as a flat list of blocks, each with its section and line, for the rules of lint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from markdown_it.token import Token

from kb.content.parser import markdown_parser


class Kind(StrEnum):
    HEADING = "heading"
    PROSE = "prose"
    CELL = "cell"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Block:
    """A heading, paragraph, table cell or code block.

    `tag` is h1 to h6 for a heading, and the info string (`python`, `log look-alike`) for a code block, whose `line` is
    the line before its code. `section` and `part` are the level-two and level-three headings above the block. `item` is
    the line of the outermost list item that contains it, 0 outside lists. In the `text` of prose a blank replaces each
    code span; `spans` has the spans, with lines.
    """

    kind: Kind
    tag: str
    section: str
    part: str
    item: int
    line: int
    text: str
    spans: tuple[tuple[int, str], ...] = ()


def blocks(text: str) -> tuple[Block, ...]:
    """The blocks of an entry file, without the front matter."""
    return tuple(_blocks(markdown_parser().parse(text)))


def _blocks(tokens: list[Token]) -> Iterator[Block]:
    section = part = tag = ""
    kind = Kind.PROSE
    items: list[int] = []
    for token in tokens:
        line = token.map[0] + 1 if token.map else 0
        if token.type == "list_item_open":
            items.append(line)
        elif token.type == "list_item_close":
            items.pop()
        elif token.type in ("fence", "code_block"):
            fence = line if token.type == "fence" else line - 1
            info = " ".join(token.info.split())
            yield Block(Kind.CODE, info, section, part, items[0] if items else 0, fence, token.content)
        elif token.type == "inline":
            prose, spans = _prose(token, line)
            section, part = _section_and_part(tag, prose.strip(), section, part)
            yield Block(kind, tag, section, part, items[0] if items else 0, line, prose, spans)
        elif token.nesting == 1:
            kind, tag = _kind_and_tag(token)


def _kind_and_tag(token: Token) -> tuple[Kind, str]:
    """The kind and tag of the text that follows an opening token."""
    if token.type == "heading_open":
        return Kind.HEADING, token.tag
    return (Kind.CELL if token.tag in ("th", "td") else Kind.PROSE), ""


def _section_and_part(tag: str, title: str, section: str, part: str) -> tuple[str, str]:
    """The section and part after a block with this tag; only headings change them."""
    if tag == "h2":
        return title, ""
    return (section, title) if tag == "h3" else (section, part)


def _prose(token: Token, line: int) -> tuple[str, tuple[tuple[int, str], ...]]:
    text = ""
    spans = []
    for child in token.children or ():
        if child.type == "code_inline":
            spans.append((line + text.count("\n"), child.content))
            text += " "
        elif child.type in ("softbreak", "hardbreak"):
            text += "\n"
        else:
            text += child.content if child.type == "text" else ""
    return text, tuple(spans)

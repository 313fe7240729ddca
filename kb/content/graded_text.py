"""The Markdown of a section to texts with their marks: what `kb.content.claims` makes claims of.

A text reaches up to the marks that end it, as its author wrote it. What no mark ends is a text of its own where its
paragraph or list item ends. A lead-in goes with the text that it leads to, a block of code with the text before it.
Headings are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise, zip_longest
from typing import NamedTuple

from markdown_it import MarkdownIt

from kb.content.grades import MARK
from kb.content.parser import markdown_parser

CODE_OR_MARKS = re.compile(rf"(?P<code>(`+)(?!`).*?(?<!`)\2(?!`))|(?P<marks>\s*{MARK.pattern}(?:\s*{MARK.pattern})*)")
GOES_ON = re.compile(r"\s*[,;:.)、，；：。）]")
SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")
LEADS_ON = (":", "：")


class Mark(NamedTuple):
    """`[source 2]` is ("source", 2), `[probe]` is ("probe", 0)."""

    word: str
    number: int


class Marked(NamedTuple):
    """A text in Markdown, prose in one line and code in lines of its own, and the marks that stood in it."""

    text: str
    marks: tuple[Mark, ...]


class _Piece(NamedTuple):
    """One block of a section. `is_new` where a paragraph outside of lists, a list item or a row of a table begins."""

    text: str
    is_code: bool
    is_new: bool


def marked(markdown: str) -> list[Marked]:
    """The texts of a section in order."""
    found: list[Marked] = []
    held = ""  # what waits for its mark, or for what it leads to
    for text, is_code, is_new in _pieces(markdown):
        if is_new and held and not _leads_on(held):
            found.append(Marked(held, ()))
            held = ""
        if is_code and not held and found:
            last = found.pop()
            found.append(last._replace(text=f"{last.text}\n{text}"))
            continue
        ended, rest = ([], text) if is_code else _split(text)
        for one in ended:
            found.append(one._replace(text=_joined(held, one.text)))
            held = ""
        held = _joined(held, rest, is_code=is_code)
    return [*found, Marked(held, ())] if held else found


def _split(text: str) -> tuple[list[Marked], str]:
    """The texts that end in marks, and what is left after the last of them."""
    ended: list[Marked] = []
    said, marks, at = "", [], 0
    for run in CODE_OR_MARKS.finditer(text):
        if run["code"]:
            continue
        said += text[at : run.start()]
        marks += [Mark(match[1] or match[2], int(match[3] or 0)) for match in MARK.finditer(run["marks"])]
        at = run.end()
        if not _goes_on(said, text[at:]):
            ended.append(Marked(said.strip(), tuple(marks)))
            said, marks = "", []
    said = (said + text[at:]).strip()
    return ([*ended, Marked(said, tuple(marks))], "") if marks else (ended, said)


def _goes_on(said: str, rest: str) -> bool:
    """Whether marks stand in the middle of a sentence."""
    return bool(GOES_ON.match(rest)) or (rest.lstrip()[:1].islower() and not said.rstrip().endswith(SENTENCE_ENDS))


def _leads_on(text: str) -> bool:
    return text.rstrip("*_ ").endswith(LEADS_ON)


def _joined(before: str, text: str, *, is_code: bool = False) -> str:
    between = "\n" if is_code or before.endswith("```") else " "
    return f"{before}{between}{text}" if before and text else before or text


@cache
def _parser() -> MarkdownIt:
    return markdown_parser().disable("inline")


def _pieces(markdown: str) -> Iterator[_Piece]:
    depth, number, is_new = 0, "", True
    rows: list[list[str]] = []
    tokens = _parser().parse(markdown)
    for before, token in pairwise([*tokens[:1], *tokens]):
        if token.type in ("list_item_open", "list_item_close"):
            depth += token.nesting
            is_new, number = True, f"{token.info}. " if token.info else ""
        elif token.type in ("fence", "code_block"):
            yield _Piece(f"```{token.info}\n{token.content.rstrip()}\n```", True, False)
        elif token.type == "tr_open":
            rows.append([])
        elif token.type == "tr_close" and len(rows) > 1:
            yield _Piece(_row(rows[0], rows[-1]), False, True)
        elif token.type == "table_close":
            rows = []
        elif token.type == "inline" and rows:
            rows[-1].append(token.content)
        elif token.type == "inline" and before.type != "heading_open":
            yield _Piece(number + " ".join(token.content.split()), False, is_new or not depth)
            is_new, number = False, ""


def _row(head: list[str], cells: list[str]) -> str:
    """A row that is understood without its table: `connection: gloo pair; gone is: one rank on that ip`."""
    return "; ".join(f"{name}: {cell}" for name, cell in zip_longest(head, cells, fillvalue="") if cell)

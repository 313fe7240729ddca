"""Splits the Markdown of a section into graded texts, from which `kb.content.claims` makes claims.

A text ends with the marks that follow it. Without marks it ends with its paragraph or list item. A lead-in belongs to
the text after it, a code block to the text before it. Headings are left out, and no words are changed.
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

CODE_OR_MARKS = re.compile(rf"(?P<code>(`+)(?!`).*?(?<!`)\2(?!`))|(?P<marks>(?:\s*{MARK.pattern})+)")
CONTINUATION = re.compile(r"\s*[,;:.)、，；：。）]")
SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")
LEAD_IN_ENDS = (":", "：")
UNPROVED = ("Not proved here: ", "此处未验证：")  # such a sentence limits the text before it


class Mark(NamedTuple):
    """`[source 2]` is ("source", 2), `[probe gloo]` is ("probe", 0, "gloo")."""

    word: str
    number: int = 0
    experiment: str = ""


class GradedText(NamedTuple):
    """A text in Markdown, with the marks that it contained. Prose is on one line, code on lines of its own."""

    text: str
    marks: tuple[Mark, ...]


class _Piece(NamedTuple):
    """One block of a section. `is_new`: it begins a paragraph outside lists, a list item or a table row."""

    text: str
    is_code: bool
    is_new: bool


def graded_texts(markdown: str) -> list[GradedText]:
    """The texts of a section in order."""
    texts: list[GradedText] = []
    pending = ""  # prose whose marks are still to come, or a lead-in
    for text, is_code, is_new in _pieces(markdown):
        if is_new and pending and not _is_lead_in(pending):
            texts.append(GradedText(pending, ()))
            pending = ""
        if is_code and not pending and texts:
            last = texts.pop()
            texts.append(last._replace(text=f"{last.text}\n{text}"))
            continue
        complete, rest = ([], text) if is_code else _split(text)
        for graded in complete:
            texts.append(graded._replace(text=_joined(pending, graded.text)))
            pending = ""
        if rest.startswith(UNPROVED) and texts and not pending:
            last = texts.pop()
            texts.append(last._replace(text=_joined(last.text, rest)))
            rest = ""
        pending = _joined(pending, rest, is_code=is_code)
    return [*texts, GradedText(pending, ())] if pending else texts


def _split(text: str) -> tuple[list[GradedText], str]:
    """The texts that end in marks, and the rest after the last of them."""
    complete: list[GradedText] = []
    prose, marks, at = "", [], 0
    for run in CODE_OR_MARKS.finditer(text):
        if run["code"]:
            continue
        prose += text[at : run.start()]
        marks += [_mark(match) for match in MARK.finditer(run["marks"])]
        at = run.end()
        if not _is_mid_sentence(prose, text[at:]):
            complete.append(GradedText(prose.strip(), tuple(marks)))
            prose, marks = "", []
    prose = (prose + text[at:]).strip()
    return ([*complete, GradedText(prose, tuple(marks))], "") if marks else (complete, prose)


def _mark(match: re.Match[str]) -> Mark:
    word = match["probe"] or match["inferred"] or match["word"]
    return Mark(word, int(match["number"] or 0), match["experiment"] or "")


def _is_mid_sentence(before: str, after: str) -> bool:
    """Whether the marks between these texts are in the middle of a sentence."""
    return bool(CONTINUATION.match(after)) or (
        after.lstrip()[:1].islower() and not before.rstrip().endswith(SENTENCE_ENDS)
    )


def _is_lead_in(text: str) -> bool:
    return text.rstrip("*_ ").endswith(LEAD_IN_ENDS)


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
    """A table row that makes sense on its own: `connection: gloo pair; gone is: one rank on that ip`."""
    return "; ".join(f"{name}: {cell}" for name, cell in zip_longest(head, cells, fillvalue="") if cell)

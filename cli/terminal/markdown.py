"""Markdown for a terminal. Prose is wrapped; code is printed unchanged from the first column so that it can be copied.

With colour, marks such as `**` are replaced by styles. Without colour they stay, so piped output is still Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode as Node

from kb.content.grades import MARK
from kb.content.parser import markdown_parser

from .output import style
from .wrapping import breaks, cells

GAP = "  "  # between the columns of a table
COPIED = 42  # up to so many characters, marks included, code is not broken across lines


class Run(NamedTuple):
    """A piece of text of one kind: `code`, `strong`, or "" for plain text."""

    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders Markdown for lines of this width."""

    width: int
    has_color: bool

    def render(self, markdown: str) -> str:
        """The rendered text. A heading is followed by its section without an empty line."""
        lines: list[str] = []
        before = "heading"
        for node in Node(_parser().parse(markdown)).children:
            if before != "heading" or (node.type == "heading" and lines):
                lines.append("")
            lines += self._block(node, 0)
            before = node.type
        return "\n".join(lines)

    def _block(self, node: Node, indent: int) -> Iterator[str]:
        """The lines of a block. Prose begins at column `indent`, code at the first column."""
        match node.type:
            case "paragraph" | "heading":
                yield from self._prose(self._inline(node), indent)
            case "fence" | "code_block":
                fence = node.markup or "```"
                yield self._dim(fence + node.info)
                yield from (self._styled(line, "code") for line in node.content.splitlines())
                yield self._dim(fence)
            case "table":
                yield from self._table(node, indent)
            case "bullet_list" | "ordered_list":
                for number, item in enumerate(node.children, int(node.attrs.get("start", 1))):
                    marker = "- " if node.type == "bullet_list" else f"{number}. "
                    yield from self._item(item, marker, indent)
            case _:
                for child in node.children:
                    yield from self._block(child, indent)

    def _item(self, item: Node, marker: str, indent: int) -> Iterator[str]:
        lines = [line for child in item.children for line in self._block(child, indent + len(marker))] or [""]
        first = item.children[0].type if item.children else ""
        if first == "paragraph":
            lines[0] = " " * indent + marker + lines[0].lstrip(" ")
        else:
            yield " " * indent + marker.rstrip()
        yield from lines

    def _table(self, table: Node, indent: int) -> Iterator[str]:
        """A table with aligned columns, or, if it is too wide, each row as an item that repeats the headings."""
        head, *rows = [
            [self._inline(cell) for cell in row.children] for part in table.children for row in part.children
        ]
        widths = [max(cells(_plain(row[column])) for row in (head, *rows)) for column in range(len(head))]
        if indent + sum(widths) + len(GAP) * (len(widths) - 1) <= self.width:
            for number, row in enumerate([head, *rows]):
                padded = [
                    self._line(cell if number else [Run(_plain(cell), "strong")]) + " " * (width - cells(_plain(cell)))
                    for cell, width in zip(row, widths, strict=True)
                ]
                yield (" " * indent + GAP.join(padded)).rstrip()
            return
        for row in rows:
            runs: list[Run] = []
            for heading, cell in zip(head, row, strict=True):
                if _plain(cell):
                    label = f"{_plain(heading)}: " if _plain(heading) else ""
                    runs += [Run("; " if runs else ""), Run(label), *cell]
            first, *more = self._prose(runs, indent + 2)
            yield " " * indent + "- " + first.lstrip(" ")
            yield from more

    def _prose(self, runs: list[Run], indent: int) -> Iterator[str]:
        """Wrapped lines. The mark of a claim and a short piece of code, which somebody may copy, stay on one line."""
        width = self.width - indent
        unbroken = "".join(_unbroken(run.text, width) if run.kind == "code" else run.text for run in runs)
        for start, end in breaks(MARK.sub(lambda mark: mark[0].replace(" ", "_"), unbroken), width):
            yield " " * indent + self._line(_part(runs, start, end))

    def _line(self, runs: list[Run]) -> str:
        return "".join(self._styled(run.text, run.kind) for run in runs)

    def _inline(self, node: Node) -> list[Run]:
        """The text of a paragraph, a heading or a cell, as runs."""
        if node.type == "heading":
            text = _plain(list(self._runs(node, "")))
            return [Run(text, "strong")] if self.has_color else [Run(f"{node.markup} {text}")]
        return list(self._runs(node, ""))

    def _runs(self, node: Node, kind: str) -> Iterator[Run]:
        for child in node.children:
            match child.type:
                case "softbreak" | "hardbreak":
                    yield Run(" " if child.type == "softbreak" else "\n")
                case "code_inline":
                    mark = "" if self.has_color else child.markup
                    yield Run(f"{mark}{child.content}{mark}", "code")
                case "strong" | "em":
                    if self.has_color:
                        yield from self._runs(child, "strong")
                    else:
                        yield from (Run(child.markup), *self._runs(child, ""), Run(child.markup))
                case "link":
                    yield from self._runs(child, kind)
                    if child.attrs["href"] != _plain(list(self._runs(child, ""))):
                        yield Run(f" ({child.attrs['href']})")
                case "inline":
                    yield from self._runs(child, kind)
                case _:
                    yield Run(child.content, kind)

    def _styled(self, text: str, kind: str) -> str:
        if not self.has_color or not kind or not text:
            return text
        return style(text, "cyan") if kind == "code" else style(text, bold=True)

    def _dim(self, text: str) -> str:
        return style(text, dim=True) if self.has_color else text


@cache
def _parser() -> MarkdownIt:
    return markdown_parser()


def _unbroken(code: str, width: int) -> str:
    """Code as a stand-in of equal length for wrapping: no backticks, and no spaces where it must not be broken."""
    code = code.replace("`", "_")
    is_command = code.strip("_").startswith(("kb ", "--"))
    return code.replace(" ", "_") if is_command or len(code) <= max(width // 2, COPIED) else code


def _plain(runs: list[Run]) -> str:
    return "".join(run.text for run in runs)


def _part(runs: list[Run], start: int, end: int) -> list[Run]:
    """The runs for the characters from `start` to `end` of the whole text."""
    part, at = [], 0
    for run in runs:
        text = run.text[max(0, start - at) : max(0, end - at)]
        part += [Run(text, run.kind)] if text else []
        at += len(run.text)
    return part

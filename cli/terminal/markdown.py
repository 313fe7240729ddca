"""Markdown at a terminal, rendered by Rich, except for code, which stays copyable."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.text import Text


class Code(CodeBlock):
    """Lines as written: wrapping them to the terminal's width would change the code."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in str(self.text).rstrip().splitlines():
            yield Text(f"    {line}", style="cyan", no_wrap=True, overflow="ignore")


class Terminal(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "fence": Code, "code_block": Code}

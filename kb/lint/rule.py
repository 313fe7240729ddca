"""What a rule of `kb lint` is given, and what it answers.

A rule is a function: its name with hyphens is the rule's name, its docstring the requirement, in one
sentence. It yields a line and a message for every place that breaks it. Rules of entries get a `Draft`, rules of
probes a `ProbeFile`, those of the glossary a `GlossaryDraft` (in kb.lint.glossary): plain data, read beforehand, so
that a rule does nothing but judge.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kb.content.entry import Entry, FrontMatter
from kb.lint.body import Block, Kind

CHINESE = re.compile(r"[\u4e00-\u9fff]")

Remark = tuple[int, str]


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place where an entry or a probe breaks a rule. `line` counts from 1."""

    path: Path
    line: int
    rule: str
    message: str

    def to_json(self) -> dict[str, Any]:
        return {"file": str(self.path), "line": self.line, "rule": self.rule, "message": self.message}


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry under review, with what its rules compare it to.

    `ids` are those of all roots, `slow` the patterns that must not be run in this process: one may take for ever.
    """

    entry: Entry
    source: str
    body: tuple[Block, ...]
    ids: frozenset[str]
    has_probe_file: bool
    slow: frozenset[str]
    today: datetime.date

    @property
    def meta(self) -> FrontMatter:
        return self.entry.meta

    def line(self, *at: str | int) -> int:
        """Line of a front-matter path such as `("signatures", 0, "pattern")`, or of the nearest thing around it."""
        return next((self.entry.lines[at[:n]] for n in range(len(at), 0, -1) if at[:n] in self.entry.lines), 1)

    def blocks(self, kind: Kind, *sections: str) -> Iterator[Block]:
        """Blocks of one kind, of all sections when none is named."""
        return (one for one in self.body if one.kind is kind and (one.section in sections or not sections))

    def texts(self) -> Iterator[Block]:
        """Everything that is read as prose: paragraphs, list items, table cells."""
        return (one for one in self.body if one.kind in (Kind.PROSE, Kind.CELL))


@dataclass(frozen=True, slots=True)
class ProbeFile:
    """A probe file under review. `owner` is the entry that names it, `faults` what its interpreter said of it.

    `needs_gpus` is whether an experiment of its declaration does, None when the declaration could not be read.
    """

    path: Path
    source: str
    owner: str
    faults: tuple[str, ...]
    needs_gpus: bool | None = None


EntryRule = Callable[[Draft], Iterator[Remark]]
ProbeRule = Callable[[ProbeFile], Iterator[Remark]]


def name_of(rule: Callable[..., Iterator[Remark]]) -> str:
    return rule.__name__.replace("_", "-")

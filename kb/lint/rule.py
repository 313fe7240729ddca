"""The input and output of a rule of `kb lint`.

A rule is a function. Its name, with hyphens, is the name of the rule; its docstring is the requirement, in one
sentence. It yields a line and a message for every violation. A rule gets data that was read before, so rules are pure:
an `EntryFile` for entries, or an `EntryText` if it needs no front matter, a `ProbeFile` for probes, a `GlossaryFile`
(in kb.lint.glossary) for the glossary.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kb.content.entry import Entry, FrontMatter
from kb.content.languages import Language
from kb.lint.body import Block, Kind
from kb.probe import Probe
from kb.records.libraries import LibraryVerdict
from kb.records.occurrences import Occurrences
from kb.records.releases import ReleaseVerdict

Remark = tuple[int, str]


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """A place where an entry or a probe breaks a rule. `line` counts from 1."""

    path: Path
    line: int
    rule: str
    message: str

    def to_json(self) -> dict[str, Any]:
        return {"file": str(self.path), "line": self.line, "rule": self.rule, "message": self.message}


@dataclass(frozen=True, slots=True)
class EntryText:
    """The text of an entry file, whose front matter may be invalid. `languages` are the languages of its root."""

    path: Path
    source: str
    body: tuple[Block, ...]
    languages: frozenset[Language]

    @property
    def is_translated(self) -> bool:
        """Whether the entry is in English with a Chinese title and a Chinese part."""
        return len(self.languages) > 1

    @property
    def sections(self) -> frozenset[str]:
        return frozenset(block.section for block in self.blocks(Kind.HEADING))

    def blocks(self, kind: Kind, *sections: str) -> Iterator[Block]:
        """The blocks of a kind in these sections, or in all sections."""
        return (block for block in self.body if block.kind is kind and (block.section in sections or not sections))

    def texts(self) -> Iterator[Block]:
        """All prose: paragraphs, list items, table cells."""
        return (block for block in self.body if block.kind in (Kind.PROSE, Kind.CELL))


@dataclass(frozen=True, slots=True)
class OnRecord:
    """Verdicts on the entry in `docs/verified/`, and which releases contain its texts and the names in its code."""

    releases: tuple[ReleaseVerdict, ...] = ()
    libraries: tuple[LibraryVerdict, ...] = ()
    wordings: Occurrences = field(default_factory=Occurrences)
    names: Occurrences = field(default_factory=Occurrences)


@dataclass(frozen=True, slots=True)
class EntryFile(EntryText):
    """An entry to check, and the data that rules compare it with.

    `ids` are the ids of all content roots. `slow` are the patterns that must not run in this process, since they might
    not end.
    """

    entry: Entry
    ids: frozenset[str]
    probe: ProbeFile | None
    slow: frozenset[str]
    today: datetime.date
    on_record: OnRecord = field(default_factory=OnRecord)

    @property
    def meta(self) -> FrontMatter:
        return self.entry.meta

    def line(self, *at: str | int) -> int:
        """The line of a front-matter path such as `("signatures", 0, "pattern")`, or of its nearest ancestor."""
        return next((self.entry.lines[at[:n]] for n in range(len(at), 0, -1) if at[:n] in self.entry.lines), 1)


@dataclass(frozen=True, slots=True)
class ProbeFile:
    """A probe file to check. `owner` is the entry that names it, `faults` are errors from loading it.

    `declaration` has no functions; it is None if the probe could not be loaded.
    """

    path: Path
    source: str
    owner: str
    faults: tuple[str, ...]
    declaration: Probe | None = None


TextRule = Callable[[EntryText], Iterator[Remark]]
EntryRule = Callable[[EntryFile], Iterator[Remark]]
ProbeRule = Callable[[ProbeFile], Iterator[Remark]]


def name_of(rule: Callable[..., Iterator[Remark]]) -> str:
    return rule.__name__.replace("_", "-")

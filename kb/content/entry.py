"""The model of an entry, which describes one class of incidents: front matter and sections.

`FrontMatter` is strict: unknown keys and implicit conversions are errors. `kb lint --schema` prints its JSON Schema.
`Entry` adds the body. `kb.content.parser` reads the files.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kb.content.area import Area
from kb.content.facets import FACETS, Component, Phase, Symptom
from kb.content.grades import Grade, without_marks
from kb.errors import UsageError
from kb.patterns.reserved_sets import may_change
from kb.patterns.syntax import parse

ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")

SECTIONS = ("Symptom", "Environment", "Root cause", "How to tell", "Fix", "Why it works", "Known cases", "中文")
TRANSLATION = SECTIONS[-1]
PART = re.compile(r"^### +(.+?) *$", re.MULTILINE)
CHINESE_PARTS = ("症状", "环境", "原因", "修复", "判断")


class Status(StrEnum):
    """How well the entry as a whole is established."""

    CONFIRMED = "confirmed"  # its probe reproduces the mechanism
    REPORTED = "reported"  # only threads say so
    DISPUTED = "disputed"
    WITHDRAWN = "withdrawn"  # never a search hit; stays because ids are never reused


class Severity(StrEnum):
    """What the incident costs."""

    CRITICAL = "critical"  # silently wrong results, or a checkpoint is lost
    HIGH = "high"  # a running job hangs or dies
    MEDIUM = "medium"  # the job fails at its start
    LOW = "low"  # a warning, or waste


class Role(StrEnum):
    """What a matching line shows about the cause."""

    ROOT = "root"  # the line names the cause
    CASCADE = "cascade"  # a consequence, often printed by a healthy rank
    CONTEXT = "context"  # where it happened; never evidence alone


class ReviewPoint(StrEnum):
    """What a review checked."""

    NEGATIVES = "negatives"  # searched for a counter-example to each
    CONTEXTS = "contexts"  # each fix where it may hurt: containers, schedulers, full environments, unprivileged users
    PATTERNS = "patterns"  # each pattern against healthy logs, logs of neighbours and wordings of other versions
    CHECKS = "checks"  # the probe's check says unknown if it cannot know
    CHINESE = "chinese"  # says the same as the English


def _entry_id(value: str) -> str:
    if not ID.fullmatch(value):
        raise ValueError("an id is lower-case words joined by single hyphens")
    return value


def _regex(value: str) -> str:
    if may_change(value):
        raise ValueError("not a regular expression: it has a set such as `[[` or `&&`, which will change its meaning")
    try:
        check = re.compile if "(?<" in value else parse  # the parser checks everything except the width of look-behinds
        check(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return value


def _specifier(value: str) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier:
        raise ValueError(f"{value!r} is not a PEP 440 specifier") from None
    return value


EntryId = Annotated[str, AfterValidator(_entry_id)]
Regex = Annotated[str, Field(min_length=1), AfterValidator(_regex)]
Specifier = Annotated[str, AfterValidator(_specifier)]
Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Signature(_Strict):
    """A pattern that points to this entry when a log matches it: see `kb.patterns.literals.find`.

    `printed_by` are the packages whose files contain the text, with the releases that do: see `kb.records.wordings`.
    `fix` is the number of the item of `Fix` to begin with where this text is printed.
    """

    pattern: Regex
    role: Annotated[Role, Field(strict=False)]
    source: Text
    sample: Text
    printed_by: dict[str, Specifier] = {}
    fix: Annotated[int, Field(ge=1)] = 1


class Reference(_Strict):
    """Where a claim can be checked, what is seen there, and how it was checked."""

    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    shows: Text
    grade: Annotated[Grade, Field(strict=False)]


class FrontMatter(_Strict):
    """The YAML block of an entry."""

    id: EntryId
    title: Annotated[str, Field(min_length=1, max_length=120)]
    title_zh: Annotated[str, Field(min_length=1, max_length=80, default_factory=lambda data: data.get("title", ""))]
    status: Annotated[Status, Field(strict=False)]
    severity: Annotated[Severity, Field(strict=False)]
    area: Annotated[Area | None, Field(strict=False)] = None  # optional: a private root may be older than areas
    symptoms: list[Annotated[Symptom, Field(strict=False)]] = []  # the three facets are optional for the same reason
    phases: list[Annotated[Phase, Field(strict=False)]] = []
    components: list[Annotated[Component, Field(strict=False)]] = []
    tags: Annotated[list[Text], Field(min_length=1)]
    aliases: list[Text] = []
    signatures: Annotated[list[Signature], Field(min_length=1)]
    not_signatures: list[Text] = []
    applies_to: dict[str, Specifier] = {}
    fixed_in: dict[str, Specifier] = {}
    causes: list[EntryId] = []
    caused_by: list[EntryId] = []
    masked_by: list[EntryId] = []
    references: list[Reference] = []
    probe: Annotated[str | None, Field(pattern=r"^[a-z0-9_]+$")] = None
    probe_waiver: Text | None = None
    replaces: EntryId | None = None
    reviewed: datetime.date
    checked: Annotated[tuple[Annotated[ReviewPoint, Field(strict=False)], ...], Field(strict=False)] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """One `##` section of the body: its Markdown source and the first line of its text."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One class of incidents.

    `origin` names its content root. `digest` (sha256 of the file) ties a report to the wording that it verified. The
    signatures must match every text of `logs` and none of `look_alikes`. `lines` maps a front-matter path such as
    `("signatures", 0)` to its line.
    """

    meta: FrontMatter
    sections: dict[str, Section]
    logs: tuple[Section, ...]
    look_alikes: tuple[Section, ...]
    path: Path
    origin: str
    digest: str
    lines: dict[tuple[str | int, ...], int]

    @property
    def id(self) -> str:
        return self.meta.id

    @property
    def id_line(self) -> int:
        """The line of `replaces` if the entry has one, otherwise the line of `id`."""
        return self.lines.get(("replaces",), self.lines.get(("id",), 1))

    @property
    def cause(self) -> str:
        """The root cause in one line: the first sentence of its section, without grade marks."""
        return first_sentence(self.section("Root cause"))

    def summary(self) -> dict[str, Any]:
        """The entry as it is listed. `frameworks` are the packages whose versions it names."""
        meta = self.meta
        return {
            "id": self.id,
            "title": meta.title,
            "title_zh": meta.title_zh,
            "cause": self.cause,
            "status": meta.status.value,
            "severity": meta.severity.value,
            "area": meta.area and meta.area.value,
            "tags": meta.tags,
            "frameworks": sorted({*meta.applies_to, *meta.fixed_in}),
            "origin": self.origin,
            "probe": meta.probe,
        }

    @property
    def facets(self) -> list[str]:
        """The symptoms, phases and components of the entry, as written in `kb.content.facets.VALUES`."""
        return [f"{name}:{value}" for name in FACETS for value in getattr(self.meta, name)]

    @property
    def failure_patterns(self) -> list[str]:
        """The patterns that may name the failure of a control arm: those of the root and cascade signatures."""
        return [signature.pattern for signature in self.meta.signatures if signature.role is not Role.CONTEXT]

    def section(self, heading: str) -> str:
        section = self.sections.get(heading)
        return section.text if section else ""

    def heading(self, beginning: str) -> str:
        """The first heading with this beginning, ignoring case. Raises `UsageError` if there is none."""
        for heading in self.sections:
            if beginning.strip() and heading.lower().startswith(beginning.strip().lower()):
                return heading
        raise UsageError(f"{self.id} has no section {beginning!r}", f"one of: {', '.join(self.sections)}")

    def translation(self) -> dict[str, str]:
        """The parts of the Chinese section by their headings; empty if the entry is only in English."""
        _, *pieces = PART.split(self.section(TRANSLATION))
        return {heading: text.strip() for heading, text in zip(pieces[::2], pieces[1::2], strict=True)}

    def to_json(self) -> dict[str, Any]:
        """The entry as `kb show --json` and the API return it."""
        body = {heading: section.text for heading, section in self.sections.items()}
        return {
            **self.meta.model_dump(mode="json"),
            "cause": self.cause,
            "sections": body,
            "origin": self.origin,
            "digest": self.digest,
        }


def first_sentence(markdown: str) -> str:
    """First sentence of a Markdown text as plain text, English or Chinese."""
    paragraph = markdown.strip().split("\n\n", 1)[0]
    text = re.sub(r"[`*]", "", without_marks(" ".join(paragraph.split())))
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])|(?<=[。！？])", text, maxsplit=1)[0]

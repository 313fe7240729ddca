"""The results of a search, as they are stored, printed and sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kb.content.applicability import Applicability
from kb.content.languages import CHINESE
from kb.search.decision import Kind
from kb.search.explanation import Explanation

OPTIONAL = ("why", "applicability", "verified_on", "difference")  # members of a hit that not every answer has
SNIPPET_LENGTH = 160


@dataclass(frozen=True, slots=True)
class VerifiedOn:
    """Hardware like the reader's on which the fix was verified: `reports` on it, one of them on `gpu` with `torch`.

    `reason` says in words what is alike.
    """

    gpu: str
    torch: str
    reports: int
    reason: str


@dataclass(frozen=True, slots=True)
class Difference:
    """How an entry differs from a question: words of it that the entry lacks, and facets that the entry is not about.

    Facets are values of `kb.content.facets.VALUES`: `symptoms:slow`.
    """

    lacks: tuple[str, ...]
    facets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """One entry with a reason. `matched` are the user's words; `signature` the pattern that matched, or "".

    `why` are the parts of the score, `applicability` what the versions here say, `verified_on` where the fix was
    verified on hardware like the reader's: all None unless asked for. `difference` says how the entry differs from a
    question that it does not answer; None in an answer.
    """

    id: str
    title: str
    title_zh: str
    cause: str
    cause_zh: str
    status: str
    severity: str
    area: str | None
    tags: tuple[str, ...]
    frameworks: tuple[str, ...]
    origin: str
    probe: str | None
    score: float
    matched: tuple[str, ...]
    signature: str
    snippet: str
    why: Explanation | None = None
    applicability: Applicability | None = None
    verified_on: VerifiedOn | None = None
    difference: Difference | None = None

    def to_json(self) -> dict[str, Any]:
        """The hit as `kb search --json` prints it."""
        document = {field.name: getattr(self, field.name) for field in fields(self)}  # asdict would copy every tuple
        added = {name: asdict(value) for name in OPTIONAL if (value := document[name]) is not None}
        return asked({**document, **added})


def asked(hit: dict[str, Any]) -> dict[str, Any]:
    """A hit's document without the optional members that nobody asked for."""
    return {name: value for name, value in hit.items() if value is not None or name not in OPTIONAL}


@dataclass(frozen=True, slots=True)
class Answer:
    """Hits, best first, and a corrected spelling if words of the question are unknown.

    `kind` says what the hits are: an answer, entries about something near, or nothing near. `probability` is the
    probability that the best hit is an answer. A question that `is_vague` has only common words: see
    `kb.search.decision`. `facets` are the facets that the question names.
    """

    query: str
    hits: tuple[Hit, ...]
    did_you_mean: str
    kind: Kind
    probability: float
    is_vague: bool
    facets: tuple[str, ...] = ()

    @property
    def answered(self) -> bool:
        """Whether the best hit is an answer; if not, the question is a gap in what the entries know."""
        return self.kind is Kind.ANSWER

    @property
    def in_chinese(self) -> bool:
        """Whether the question is in Chinese."""
        return CHINESE.search(self.query) is not None

    @property
    def best(self) -> str:
        """The id of the nearest entry; "" if there is none."""
        return self.hits[0].id if self.hits else ""


def snippet(lines: list[str], matched: Sequence[str], *, in_chinese: bool) -> str:
    """The stored line with most of the matched words; for a long line, the part around the first match, in whole words.

    An English question gets a line without Chinese, if the entry has one.
    """
    readable = lines if in_chinese else [line for line in lines if not CHINESE.search(line)] or lines
    words = [word.lower() for word in matched]

    def matches_in(line: str) -> int:
        low = line.lower()
        return len([word for word in words if word in low])  # faster than a sum over a generator

    line = max(readable, key=matches_in, default="")
    if len(line) <= SNIPPET_LENGTH:
        return line
    at = min((line.lower().find(word) for word in words if word in line.lower()), default=0)
    start = min(max(0, at - SNIPPET_LENGTH // 3), len(line) - SNIPPET_LENGTH)
    cut = line[start : start + SNIPPET_LENGTH]
    before = re.sub(r"^\S{0,20} ", "…", cut) if start else cut  # without the word that was cut
    return re.sub(r" \S{0,20}$", "…", before) if start + SNIPPET_LENGTH < len(line) else before

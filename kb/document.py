"""An entry as the index keeps it: weighted texts to find it by, and what a search result shows.

A title and the words people use count more than prose. The weights are the only tuning of the ranking.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Set
from typing import Any

from kb import catalog, glossary
from kb.analysis import terms
from kb.entry import Entry, Role, first_sentence
from kb.lint.backtracking import backtracking_risk
from kb.root import Root
from kb.signature import required_literal

TITLE, ALIAS, SAMPLE, SYMPTOM, CASE, PROSE, REFERENCE = 4.0, 3.0, 1.5, 1.5, 1.5, 1.0, 0.5
LOOK_ALIKES = "How to tell"  # speaks of other incidents as much as of its own
WEIGHTS = {"Symptom": SYMPTOM, "Known cases": CASE, LOOK_ALIKES: 0.5}

Document = tuple[dict[str, Any], list[tuple[float, str]]]


def collect(roots: tuple[Root, ...], notice: Any) -> tuple[list[Document], dict[str, Any]]:
    """Documents of all entries, and the side table: signatures, spellings, synonyms, entries left out."""
    started = time.monotonic()
    is_told = False
    found = catalog.load(roots)
    documents = []
    for number, entry in enumerate(found):
        if not is_told and time.monotonic() - started > 1:
            notice(f"building the search index of {len(found)} entries (once, and after a change) ...")
            is_told = number >= 0
        documents.append(document(entry, others=found.entries.keys() - {entry.id}))
    problems = [problem.message for problem in found.problems]
    for problem in problems:
        notice(f"left out: {problem}")
    side = {
        "signatures": _signatures(found.current()),
        "surfaces": _surfaces(documents),
        "synonyms": list(glossary.synonyms().items()),
        "problems": problems,
    }
    return documents, side


def document(entry: Entry, others: Set[str] = frozenset()) -> Document:
    """(what is stored, weighted texts) of one entry. The ids of others are left out: they are not about this one."""
    meta = entry.meta
    mention = re.compile("|".join(f"`{re.escape(one)}`" for one in sorted(others)) or "(?!)")
    sections = {heading: mention.sub("", _own(section.text, entry)) for heading, section in entry.sections.items()}
    stored = {
        "id": entry.id,
        "title": meta.title,
        "title_zh": meta.title_zh,
        "cause": entry.cause,
        "cause_zh": chinese_cause(entry),
        "status": meta.status.value,
        "severity": meta.severity.value,
        "tags": meta.tags,
        "frameworks": sorted({*meta.applies_to, *meta.fixed_in}),
        "origin": entry.origin,
        "probe": meta.probe,
        "lines": _lines(entry, sections),
    }
    parts = [
        (TITLE, f"{entry.id.replace('-', ' ')} {meta.title}"),
        (TITLE, meta.title_zh),
        *((ALIAS, alias) for alias in meta.aliases),
        (ALIAS, " ".join(meta.tags)),
        *((SAMPLE, signature.sample) for signature in meta.signatures),
        *((WEIGHTS.get(heading, PROSE), text) for heading, text in sections.items()),
        *((REFERENCE, f"{reference.shows} {reference.url}") for reference in meta.references),
    ]
    return stored, parts


def _own(text: str, entry: Entry) -> str:
    """The text without the logs of other incidents."""
    for log in entry.look_alikes:
        text = text.replace(log.text, "")
    return text


def chinese_cause(entry: Entry) -> str:
    """First sentence under `### 原因`."""
    _, _, rest = entry.section("中文").partition("### 原因")
    return first_sentence(rest.partition("\n### ")[0])


def _lines(entry: Entry, sections: dict[str, str]) -> list[str]:
    """Lines a snippet is taken from: what people call it, what is printed, what was seen."""
    own = [text for heading, text in sections.items() if heading != LOOK_ALIKES]
    prose = [line.strip() for text in own for line in text.splitlines()]
    lines = [*entry.meta.aliases, *(one.sample for one in entry.meta.signatures), *prose]
    return [line for line in lines if len(line) > 3 and not line.startswith(("```", "###"))]


def _signatures(entries: list[Entry]) -> list[dict[str, str]]:
    return [
        {"id": entry.id, "role": one.role.value, "pattern": one.pattern, "literal": required_literal(one.pattern)}
        for entry in entries
        for one in entry.meta.signatures
        if one.role is not Role.CONTEXT and not backtracking_risk(one.pattern)  # a search must not hang on a text
    ]


def _surfaces(documents: list[Document]) -> dict[str, str]:
    """For each stemmed English term the spelling used most: what `did you mean` shows."""
    seen: dict[str, Counter[str]] = {}
    for _, parts in documents:
        for _, text in parts:
            for term in terms(text):
                if term.text.isascii() and term.text.isalpha() and len(term.text) > 3 and term.surface.isalpha():
                    seen.setdefault(term.text, Counter())[term.surface.lower()] += 1
    return {term: counter.most_common(1)[0][0] for term, counter in seen.items()}

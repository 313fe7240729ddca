"""An entry as the index keeps it: weighted texts to find it by, and what a search result shows.

A headline is a line that an entry can be known by: a title, an alias, the tags. It counts more than what the
incident shows, its logs, and that more than prose.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Set
from typing import Any

from kb.content.catalog import load_catalog
from kb.content.causes import graph
from kb.content.entry import Entry, first_sentence
from kb.content.roots import Root
from kb.patterns.literals import literals
from kb.patterns.redos import backtracking_risk
from kb.search import synonyms
from kb.search.tokenizer import STOP_WORDS, normal

HEADLINE, SHOWN, PROSE = 3.0, 0.5, 0.25  # cross-validated by tests/bench/tuning.py: finer grades do not help
LOOK_ALIKES = "How to tell"  # speaks of other incidents as much as of its own

MENTION = re.compile(r"`([a-z0-9-]+)`")
PLAIN_WORD = re.compile(r"(?<![\w.\-/:])[a-z]{4,}(?!\w|[.\-/:]+\w)", re.ASCII)  # no part of an identifier
FENCED = re.compile(r"^ *```.*?^ *```\n?", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^ {0,3}(?:[-*]|\d{1,2}\.) +", re.MULTILINE)

Document = tuple[dict[str, Any], list[tuple[float, str]]]


def collect(roots: tuple[Root, ...], notice: Any) -> tuple[Iterator[Document], dict[str, Any]]:
    """Documents of all entries, and the side table: signatures, links, synonyms, entries left out.

    An entry is forgotten once its document has been taken: ten thousand of either fill a gigabyte.
    """
    started = time.monotonic()
    found = load_catalog(roots)
    problems = [problem.message for problem in found.problems]
    for problem in problems:
        notice(f"left out: {problem}")
    links = graph(found.current())
    side = {
        "signatures": _signatures(found.current()),
        "causes": links.causes,
        "masks": links.masks,
        "synonyms": list(synonyms.synonyms().items()),
        "problems": problems,
    }
    return _documents(found.entries, started, notice), side


def _documents(entries: dict[str, Entry], started: float, notice: Any) -> Iterator[Document]:
    ids = frozenset(entries)
    is_told = False
    for entry_id in list(entries):
        if not is_told and time.monotonic() - started > 1:
            notice(f"building the search index of {len(ids)} entries (once, and after a change) ...")
            is_told = True
        yield document(entries.pop(entry_id), ids)


def document(entry: Entry, ids: Set[str] = frozenset()) -> Document:
    """(what is stored, weighted texts) of one entry. The ids of others are left out: they are not about this one."""
    meta = entry.meta
    sections = {heading: _own(section.text, entry, ids) for heading, section in entry.sections.items()}
    stored = {
        **entry.summary(),
        "cause_zh": chinese_cause(entry),
        "applies_to": meta.applies_to,
        "fixed_in": meta.fixed_in,
        "lines": _lines(entry, sections),
        "tells": _tells(entry),
    }
    parts = [
        (HEADLINE, f"{entry.id.replace('-', ' ')} {meta.title}"),
        (HEADLINE, meta.title_zh),
        *((HEADLINE, alias) for alias in meta.aliases),
        (HEADLINE, " ".join(meta.tags)),
        *((SHOWN, signature.sample) for signature in meta.signatures),
        *((SHOWN if heading == "Symptom" else PROSE, text) for heading, text in sections.items()),
        *((PROSE, f"{reference.shows} {reference.url}") for reference in meta.references),
    ]
    return stored, parts


def _own(text: str, entry: Entry, ids: Set[str]) -> str:
    """The text without the logs of other incidents and without the ids of other entries."""
    for log in entry.look_alikes:
        text = text.replace(log.text, "")
    return MENTION.sub(lambda found: "" if found[1] in ids and found[1] != entry.id else found[0], text)


def _tells(entry: Entry) -> list[str]:
    """The list items of `How to tell`: each an observation that separates this incident from others."""
    prose = FENCED.sub("", entry.section(LOOK_ALIKES))
    return [" ".join(item.split()) for item in ITEM.split(prose)[1:]]


def chinese_cause(entry: Entry) -> str:
    """First sentence under `### 原因`."""
    _, _, rest = entry.section("中文").partition("### 原因")
    return first_sentence(rest.partition("\n### ")[0])


def _lines(entry: Entry, sections: dict[str, str]) -> list[str]:
    """Lines a snippet is taken from: what people call it, what is printed, what was seen."""
    own = [text for heading, text in sections.items() if heading != LOOK_ALIKES]
    prose = [line.strip() for text in own for line in text.splitlines()]
    lines = [*entry.meta.aliases, *(signature.sample for signature in entry.meta.signatures), *prose]
    return [line for line in lines if len(line) > 3 and not line.startswith(("```", "###"))]


def _signatures(entries: list[Entry]) -> list[dict[str, Any]]:
    return [
        {
            "id": entry.id,
            "role": signature.role.value,
            "pattern": signature.pattern,
            "literals": sorted(literals(signature.pattern)),
        }
        for entry in entries
        for signature in entry.meta.signatures
        if not backtracking_risk(signature.pattern)  # a search must not hang on a text
    ]


def plain_words(parts: list[tuple[float, str]]) -> list[str]:
    """The English words of a document that are no part of an identifier, in lower case."""
    return [word for _, text in parts for word in PLAIN_WORD.findall(text.lower())]


def surfaces(seen: Counter[str]) -> dict[str, list[str]]:
    """For each stemmed English term the spellings used most: what a misspelt word of a question is compared with."""
    found: dict[str, list[str]] = {}
    for spelling, _ in seen.most_common():
        if spelling not in STOP_WORDS:
            found.setdefault(normal(spelling), []).append(spelling)
    return {term: spellings[:3] for term, spellings in found.items()}

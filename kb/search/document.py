"""An entry as the index stores it: weighted texts to find it by, and what a search result shows.

A headline is a line by which an entry can be known: a title, an alias, the tags. It counts more than what the incident
prints, and that counts more than prose.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set
from typing import Any

from kb.content.entry import Entry, Status, first_sentence
from kb.content.grades import without_marks
from kb.patterns.literals import literals
from kb.patterns.redos import backtracking_risk
from kb.search.entry_record import MENTION
from kb.search.tokenizer import STOP_WORDS, normal

HEADLINE, SHOWN, PROSE = 3.0, 0.5, 0.25  # cross-validated by tests/bench/tuning.py: finer grades do not help
LOOK_ALIKES = "How to tell"  # is about other incidents as much as about its own
CHINESE_LOOK_ALIKES = re.compile(r"^### 判断.*", re.MULTILINE | re.DOTALL)  # the last part of the translation

PLAIN_WORD = re.compile(r"(?<![\w.\-/:])[a-z]{4,}(?!\w|[.\-/:]+\w)", re.ASCII)  # not part of an identifier
FENCED = re.compile(r"^ *```.*?^ *```\n?", re.MULTILINE | re.DOTALL)
MARKUP = re.compile(r"`|\*\*|^(?:[-*]|\d{1,2}\.) +")  # in one line
ITEM = re.compile(r"^ {0,3}(?:[-*]|\d{1,2}\.) +", re.MULTILINE)
NUMBERED = re.compile(r"^\d{1,2}\. +", re.MULTILINE)

Document = tuple[dict[str, Any], list[tuple[float, str]]]


def document(entry: Entry, ids: Set[str] = frozenset()) -> Document:
    """(stored document, weighted texts) of one entry. Mentions of other `ids` are left out of the texts."""
    meta = entry.meta
    sections = {heading: _own(section.text, entry) for heading, section in entry.sections.items()}
    stored = {
        **entry.summary(),
        "cause_zh": chinese_cause(entry),
        "applies_to": meta.applies_to,
        "fixed_in": meta.fixed_in,
        "lines": _lines(entry, sections),
        "tells": tells(entry),
        "fixes": fixes(entry.section("Fix")),
        "fixes_zh": fixes(entry.translation().get("修复", "")),
        "fix_by_pattern": {signature.pattern: signature.fix for signature in meta.signatures if signature.fix != 1},
    }
    parts = [
        (HEADLINE, f"{entry.id.replace('-', ' ')} {meta.title}"),
        (HEADLINE, meta.title_zh),
        *((HEADLINE, alias) for alias in meta.aliases),
        (HEADLINE, " ".join(meta.tags)),
        *((SHOWN, signature.sample) for signature in meta.signatures),
        *(
            (SHOWN if heading == "Symptom" else PROSE, _without_others(text, entry.id, ids))
            for heading, text in sections.items()
        ),
        *((PROSE, f"{reference.shows} {reference.url}") for reference in meta.references),
    ]
    return stored, parts


def _own(text: str, entry: Entry) -> str:
    """The text without the logs of other incidents and without grade marks."""
    for log in entry.look_alikes:
        text = text.replace(log.text, "")
    return without_marks(text)


def _without_others(text: str, own_id: str, ids: Set[str]) -> str:
    return MENTION.sub(lambda match: "" if match[1] in ids and match[1] != own_id else match[0], text)


def tells(entry: Entry) -> list[str]:
    """The list items of `How to tell`, each an observation that separates this incident from others."""
    prose = FENCED.sub("", entry.section(LOOK_ALIKES))
    return [" ".join(item.split()) for item in ITEM.split(prose)[1:]]


def fixes(section: str) -> list[str]:
    """What each item in a section of fixes asks the reader to do: its first sentence, as plain text."""
    prose = FENCED.sub("", section)
    items = NUMBERED.split(prose)[1:] or ITEM.split(prose)[1:] or [prose]
    return [first_sentence(item) for item in items]


def chinese_cause(entry: Entry) -> str:
    """The first sentence under `### 原因`."""
    return first_sentence(entry.translation().get("原因", ""))


def _lines(entry: Entry, sections: dict[str, str]) -> list[str]:
    """Lines from which a snippet is taken: what people call the incident, what is printed, what was seen."""
    texts = [CHINESE_LOOK_ALIKES.sub("", text) for heading, text in sections.items() if heading != LOOK_ALIKES]
    own = [line.strip() for text in texts for line in text.splitlines()]
    prose = [MARKUP.sub("", line) for line in own if not line.startswith(("```", "###"))]
    lines = [*entry.meta.aliases, *(signature.sample.strip() for signature in entry.meta.signatures), *prose]
    return [line for line in lines if len(line) > 3]


def signatures(entry: Entry) -> list[dict[str, Any]]:
    """The signatures to search for in a text; none for a withdrawn entry."""
    if entry.meta.status is Status.WITHDRAWN:
        return []
    return [
        {
            "id": entry.id,
            "role": signature.role.value,
            "pattern": signature.pattern,
            "literals": sorted(literals(signature.pattern)),
        }
        for signature in entry.meta.signatures
        if not backtracking_risk(signature.pattern)  # a search must not hang on a text
    ]


def plain_words(parts: list[tuple[float, str]]) -> list[str]:
    """The English words of a document that are not part of an identifier, in lower case."""
    return [word for _, text in parts for word in PLAIN_WORD.findall(text.lower())]


def spellings(words: Counter[str]) -> list[tuple[str, int, str]]:
    """(spelling, count, stemmed term), most common first; misspelt words of a query are compared with the spellings."""
    return [(word, count, normal(word)) for word, count in words.most_common() if word not in STOP_WORDS]

"""Generated entries, recombined from real ones and reworded, to measure how the index grows.

Each has the front matter of one real entry and the body of another, with a quarter of the words replaced by
others of the same kind, drawn from all entries by frequency. Some words are coined, so that the vocabulary grows
about as fast as in real entries. The entries mean nothing: measure time and space with them, never relevance.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kb.content.catalog import load_catalog
from kb.content.entry import SECTIONS, Entry
from kb.content.roots import Root, builtin_root

KINDS = re.compile(r"(?P<cjk>[\u4e00-\u9fff]{2,})|(?P<name>\w*[_\d]\w*|\w+[a-z][A-Z]\w*)|(?P<word>[A-Za-z]{4,})", re.A)
REPLACED = {"cjk": 0.15, "name": 0.25, "word": 0.25}
COINED = 0.12  # share of replaced names that are two joined names, and of replaced words that are new words
SYLLABLES = (
    "ba",
    "chi",
    "dor",
    "el",
    "fen",
    "gra",
    "hu",
    "ix",
    "jo",
    "kel",
    "lim",
    "mor",
    "nu",
    "or",
    "pra",
    "ras",
    "to",
)
MARKUP = ("```", "#")


class Vocabulary:
    """The words of entries by kind, repeated by frequency, and new words made from them."""

    def __init__(self, entries: Sequence[Entry], rng: random.Random) -> None:
        self._rng = rng
        self._words: dict[str, list[str]] = {kind: [] for kind in REPLACED}
        for entry in entries:
            for match in KINDS.finditer(" ".join(entry.section(heading) for heading in SECTIONS)):
                self._words[str(match.lastgroup)].append(match.group())

    def reword(self, text: str) -> str:
        """The text with some of its words replaced by others of the same kind."""
        return KINDS.sub(self._another, text)

    def word(self) -> str:
        """A new word, which most likely occurs in no entry."""
        return "".join(self._rng.choices(SYLLABLES, k=3))

    def _another(self, match: re.Match[str]) -> str:
        kind, old = str(match.lastgroup), match.group()
        if self._rng.random() > REPLACED[kind]:
            return old
        if old.isdigit():
            return str(self._rng.randrange(10 ** len(old)))
        new = self._rng.choice(self._words[kind])
        if kind == "cjk" or self._rng.random() > COINED:
            return new
        return self.word() if kind == "word" else f"{new}_{self.word()}"


def generate(home: Path, count: int, seed: int = 0) -> Root:
    """Write `count` entries into a new content root at `home`; the same seed gives the same files."""
    rng = random.Random(seed)
    models = list(load_catalog((builtin_root(),)))
    words = Vocabulary(models, rng)
    root = Root(f"generated-{count}", home / "entries", home / "probes", home / "verified")
    root.entries.mkdir(parents=True)
    root.probes.mkdir()
    for number in range(count):
        entry_id = f"{words.word()}-{words.word()}-{number:05}"
        text = _entry(entry_id, *rng.sample(models, 2), words=words)
        (root.entries / f"{entry_id}.md").write_text(text, encoding="utf-8")
    return root


def _entry(entry_id: str, head: Entry, body: Entry, *, words: Vocabulary) -> str:
    front = yaml.dump(_front(entry_id, head, words), Dumper=yaml.CSafeDumper, allow_unicode=True, sort_keys=False)
    sections = (f"## {heading}\n\n{_section(body, heading, words)}\n" for heading in SECTIONS)
    return f"---\n{front}---\n\n" + "\n".join(sections)


def _front(entry_id: str, model: Entry, words: Vocabulary) -> dict[str, Any]:
    meta = model.meta
    samples = [(signature, words.reword(signature.sample)) for signature in meta.signatures]
    return {
        "id": entry_id,
        "title": words.reword(meta.title)[:120],
        "title_zh": words.reword(meta.title_zh)[:80],
        "status": meta.status.value,
        "severity": meta.severity.value,
        "tags": list(meta.tags),
        "aliases": [words.reword(alias) for alias in meta.aliases],
        "signatures": [
            {"pattern": _pattern(sample), "role": signature.role.value, "source": signature.source, "sample": sample}
            for signature, sample in samples
        ],
        "not_signatures": [words.reword(line) for line in meta.not_signatures],
        "applies_to": dict(meta.applies_to),
        "references": [
            {"url": reference.url, "shows": words.reword(reference.shows), "grade": reference.grade.value}
            for reference in meta.references
        ],
        "probe_waiver": "generated for a benchmark",
        "reviewed": meta.reviewed,
    }


def _pattern(sample: str) -> str:
    """A pattern for the end of a sample line that allows any numbers in place of its numbers."""
    return re.sub(r"\d+", r"\\d+", re.escape(sample[-60:]))


def _section(model: Entry, heading: str, words: Vocabulary) -> str:
    lines = model.section(heading).splitlines()
    return "\n".join(line if line.startswith(MARKUP) else words.reword(line) for line in lines)

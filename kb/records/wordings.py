"""Wordings: which releases of which packages contain the text of a signature, in `docs/verified/wordings.json`.

A program composes a line from pieces. So the rarest text of a pattern is cut where a value is inserted
(`WorkNCCL(SeqNum=` gives `WorkNCCL` and `SeqNum`), and around words that come from elsewhere at run time, such as errno
messages. A release has the wording if its files contain every piece of one such text. `make wordings` searches the
releases and writes the record.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable, Mapping

from packaging.version import Version

from kb.content.roots import Root
from kb.patterns.literals import literals
from kb.records.occurrences import Occurrences, occurrences

SCHEMA = "kb.wordings.v1"
FILE = "wordings.json"
SHORTEST = 5  # characters of a piece; a shorter one is in every library
TELLING = 12  # characters of words that say enough without words from elsewhere; `RuntimeError` does not
JOINT = re.compile(r"[^A-Za-z_ ./'-]+|(?<![A-Za-z])'|'(?![A-Za-z])")
EVENTS = ("port error", "device fatal")  # what libibverbs calls an asynchronous event: `ibv_event_type_str`
ERRORS = sorted(map(os.strerror, errno.errorcode), reverse=True)  # a text before any shorter text that it begins with
ELSEWHERE = re.compile("|".join(map(re.escape, (*ERRORS, *EVENTS, "NCCL WARN"))))


def pieces(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The pieces of each rare text of a pattern; none if its texts are too short to search for."""
    return tuple(filter(None, map(_pieces, sorted(literals(pattern)))))


def _pieces(text: str) -> tuple[str, ...]:
    own = _cut(ELSEWHERE.sub("=", text))
    return own if any(len(piece) >= TELLING and " " in piece for piece in own) else _cut(text)


def _cut(text: str) -> tuple[str, ...]:
    return tuple(piece for part in JOINT.split(text) if len(piece := part.strip()) >= SHORTEST)


def is_worded(pattern: str, present: Collection[str]) -> bool:
    """Whether all pieces of one of the pattern's texts are present."""
    return any(all(piece in present for piece in each) for each in pieces(pattern))


def record(present: Mapping[tuple[str, str], Collection[str]], patterns: Iterable[str]) -> Occurrences:
    """The record, from the pieces that are present in each package and release."""
    releases: dict[str, list[str]] = {}
    for package, release in sorted(present, key=lambda key: (key[0], Version(key[1]))):
        releases.setdefault(package, []).append(release)
    found = {
        pattern: {
            package: [release for release in tried if is_worded(pattern, present[package, release])]
            for package, tried in releases.items()
            if any(is_worded(pattern, present[package, release]) for release in tried)
        }
        for pattern in sorted(set(patterns))
    }
    return Occurrences(releases, {key: by for key, by in found.items() if by})


def wordings(roots: Iterable[Root]) -> Occurrences:
    """The releases that were searched for texts, and those that have each pattern's text. Raises `UsageError`."""
    return occurrences(roots, FILE, "make wordings")

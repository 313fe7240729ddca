"""A log that no entry explains to what `kb new` can take from it: a redacted excerpt and patterns to choose from."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from kb.patterns.literals import find
from kb.patterns.redos import backtracking_risk
from kb.redaction.redactor import COLOUR, PLACEHOLDER, redact
from kb.search.query import VOLATILE

BEFORE, AFTER = 30, 50  # lines of a long log that are kept before and from the first one that looks like an error
LONGEST_LINE = 2000  # characters of a line of the excerpt
LONGEST_SAMPLE = 240
MOST = 3  # patterns: a person shall choose, not sift
RAISED = re.compile(r"(?<![\w.])(?:[A-Za-z_]\w{0,60}\.){0,8}\w{0,60}(?:Error|Exception|Interrupt|Failure)\b: ")
TROUBLE = re.compile(
    r"(?i)error|exception|\bfatal\b|fail(?:ed|ure)|abort|assert|timed? ?out|killed|\bWARN\b|cannot|unable to"
)
# What launchers and loggers print before a message: brackets, ranks, dates, levels.
PREFIX = re.compile(
    r"(?:\s|\[[^\]\n]{0,80}\]:?|<[a-z]+-\d+>:(?:\d{1,8}:\d{1,8})?|\d{1,5}:\s|\d{4}-\d\d-\d\d[T ]"
    r"|\d\d:\d\d:\d\d[.,\d]{0,12}Z?|[EWIFV]\d{4} \d\d:\d\d:\d\d\.\d{1,9} \d{1,8} [\w/.]{1,120}:\d{1,6}\]"
    r"|(?:ERROR|WARNING|INFO|CRITICAL)\b:?|[|-]\s){0,24}"
)
CHANGES = re.compile(f"(?P<token>{PLACEHOLDER.pattern}|{VOLATILE.removeprefix('(?x)')})|(?P<number>\\d+)", re.VERBOSE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pattern, and the line it was made from, which it matches."""

    pattern: str
    sample: str


@dataclass(frozen=True, slots=True)
class Draft:
    """What a log gives to a new entry. `seen` are sentences about it, one line each."""

    log: str
    candidates: tuple[Candidate, ...]
    seen: tuple[str, ...] = ()
    is_real: bool = True

    @property
    def longest_fence(self) -> int:
        return max(map(len, re.findall("`+", self.log)), default=0)


NOTHING = "TODO a regular expression over one line of the log"
NO_DRAFT = Draft("TODO a log of it: realistic, with your own numbers", (Candidate(NOTHING, NOTHING),), is_real=False)


def draft(lines: Iterable[str], seen: Iterable[str] = ()) -> Draft:
    """What is worth keeping of a log, read line by line and redacted; memory for an excerpt."""
    log = redact("\n".join(_excerpt(map(_printable, lines))).strip("\n"))
    candidates = tuple(islice(_candidates(log), MOST)) or NO_DRAFT.candidates
    return Draft(log or NO_DRAFT.log, candidates, tuple(" ".join(one.split()) for one in seen))


def _printable(line: str) -> str:
    """A line that YAML and Markdown can hold: without colours and control characters."""
    plain = COLOUR.sub("", line.rstrip("\r\n")[-LONGEST_LINE:].rpartition("\r")[2])
    return "".join(c if c.isprintable() or c == "\t" else " " for c in plain)


def _excerpt(lines: Iterable[str]) -> list[str]:
    """A short log whole; of a longer one what surrounds the first line that looks like an error, or else its end."""
    last: deque[str] = deque(maxlen=BEFORE + AFTER)
    left = iter(lines)
    for line in left:
        last.append(line)
        if TROUBLE.search(line):
            kept = list(last)
            kept += islice(left, BEFORE + AFTER - min(len(kept), BEFORE))
            return kept[-(BEFORE + AFTER) :]
    return list(last)


def _candidates(log: str) -> Iterator[Candidate]:
    """Patterns of the lines that look like errors, what was raised first; each is fit for `kb lint`."""
    lines = [line.strip()[:LONGEST_SAMPLE] for line in log.splitlines()]
    found = [line for line in lines if RAISED.search(line)] + [line for line in lines if TROUBLE.search(line)]
    known: set[str] = set()
    for line in found:
        pattern = _pattern(line)
        if len(pattern) > 10 and pattern not in known and not backtracking_risk(pattern) and find(pattern, line):
            known.add(pattern)
            yield Candidate(pattern, line)


def _pattern(line: str) -> str:
    """A line as a pattern: what changes from run to run is left open, the rest is as it stands."""
    prefix = PREFIX.match(line)
    message = line[prefix.end() if prefix else 0 :].rstrip()
    parts, at = [], 0
    for match in CHANGES.finditer(message):
        parts += [_escaped(message[at : match.start()]), r"\d+" if match["number"] else r"\S{1,200}"]
        at = match.end()
    return "".join([*parts, _escaped(message[at:])])


def _escaped(text: str) -> str:
    """Escaped for `re`, but for what needs it in no pattern without re.VERBOSE."""
    return re.sub(r"\\([ #&~-])", r"\1", re.escape(text))

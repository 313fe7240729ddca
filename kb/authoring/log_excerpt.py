"""Extracts what `kb new` uses from an unexplained log: a redacted excerpt, and patterns to choose from."""

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

BEFORE, AFTER = 30, 50  # lines of a long log before the first line that looks like an error, and from that line on
LONGEST_LINE = 2000  # characters of a line of the excerpt
LONGEST_SAMPLE = 240
MOST_CANDIDATES = 3  # few enough to choose from
RAISED = re.compile(r"(?<![\w.])(?:[A-Za-z_]\w{0,60}\.){0,8}\w{0,60}(?:Error|Exception|Interrupt|Failure)\b: ")
TROUBLE = re.compile(
    r"(?i)error|exception|\bfatal\b|fail(?:ed|ure)|abort|assert|timed? ?out|killed|\bWARN\b|cannot|unable to"
)
# The text before a message that launchers and loggers print: brackets, ranks, dates, levels.
PREFIX = re.compile(
    r"(?:\s|\[[^\]\n]{0,80}\]:?|<[a-z]+-\d+>:(?:\d{1,8}:\d{1,8})?|\d{1,5}:\s|\d{4}-\d\d-\d\d[T ]"
    r"|\d\d:\d\d:\d\d[.,\d]{0,12}Z?|[EWIFV]\d{4} \d\d:\d\d:\d\d\.\d{1,9} \d{1,8} [\w/.]{1,120}:\d{1,6}\]"
    r"|(?:ERROR|WARNING|INFO|CRITICAL)\b:?|[|-]\s){0,24}"
)
CHANGES = re.compile(f"(?P<token>{PLACEHOLDER.pattern}|{VOLATILE.removeprefix('(?x)')})|(?P<number>\\d+)", re.VERBOSE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pattern and the line that it was made from, which it matches."""

    pattern: str
    sample: str


@dataclass(frozen=True, slots=True)
class Draft:
    """The parts of a new entry that come from a log. `observations` are sentences about it, one line each."""

    log: str
    candidates: tuple[Candidate, ...]
    observations: tuple[str, ...] = ()
    is_real: bool = True

    @property
    def longest_fence(self) -> int:
        return max(map(len, re.findall("`+", self.log)), default=0)


NOTHING = "TODO a regular expression over one line of the log"
NO_DRAFT = Draft("TODO a log of it: realistic, with your own numbers", (Candidate(NOTHING, NOTHING),), is_real=False)


def draft(lines: Iterable[str], observations: Iterable[str] = ()) -> Draft:
    """Read a log line by line and redact its excerpt. Only the excerpt is held in memory."""
    log = redact("\n".join(_excerpt(map(_printable, lines))).strip("\n"))
    candidates = tuple(islice(_candidates(log), MOST_CANDIDATES)) or NO_DRAFT.candidates
    return Draft(log or NO_DRAFT.log, candidates, tuple(" ".join(sentence.split()) for sentence in observations))


def _printable(line: str) -> str:
    """A line without colours and control characters, which YAML and Markdown do not allow."""
    text = COLOUR.sub("", line.rstrip("\r\n")[-LONGEST_LINE:].rpartition("\r")[2])
    return "".join(c if c.isprintable() or c == "\t" else " " for c in text)


def _excerpt(lines: Iterable[str]) -> list[str]:
    """All of a short log; of a longer one, the lines around the first that looks like an error, or else its end."""
    last: deque[str] = deque(maxlen=BEFORE + AFTER)
    remaining = iter(lines)
    for line in remaining:
        last.append(line)
        if TROUBLE.search(line):
            excerpt = list(last)
            excerpt += islice(remaining, BEFORE + AFTER - min(len(excerpt), BEFORE))
            return excerpt[-(BEFORE + AFTER) :]
    return list(last)


def _candidates(log: str) -> Iterator[Candidate]:
    """Patterns for the lines that look like errors, exceptions first; `kb lint` accepts each of them."""
    lines = [line.strip()[:LONGEST_SAMPLE] for line in log.splitlines()]
    errors = [line for line in lines if RAISED.search(line)] + [line for line in lines if TROUBLE.search(line)]
    patterns: set[str] = set()
    for line in errors:
        pattern = _pattern(line)
        if len(pattern) > 10 and pattern not in patterns and not backtracking_risk(pattern) and find(pattern, line):
            patterns.add(pattern)
            yield Candidate(pattern, line)


def _pattern(line: str) -> str:
    """A pattern for a line: open for parts that differ between runs, literal elsewhere."""
    prefix = PREFIX.match(line)
    message = line[prefix.end() if prefix else 0 :].rstrip()
    parts, at = [], 0
    for match in CHANGES.finditer(message):
        parts += [_escaped(message[at : match.start()]), r"\d+" if match["number"] else r"\S{1,200}"]
        at = match.end()
    return "".join([*parts, _escaped(message[at:])])


def _escaped(text: str) -> str:
    """`re.escape` without the escapes that only re.VERBOSE requires."""
    return re.sub(r"\\([ #&~-])", r"\1", re.escape(text))

"""Reads the lines of excerpts, each with the rank that printed it, its time, and its text without prefixes.

Besides the prefixes of `kb.diagnose.scan.log_prefix`, the text itself may name the rank: `rank 3 step 40`, `[3] loss
2.1` after the header of a logger, or `"rank": 3` in a line of JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kb.diagnose.evidence import LONGEST_EVIDENCE, Line
from kb.diagnose.scan.log_prefix import parse_prefix
from kb.diagnose.story.excerpt import Excerpt

HEADER = re.compile(  # of logging, loguru, glog and Megatron
    r"""\A\s*(?:(?:\[?\d{4}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d+)?\]?|\d\d:\d\d:\d\d(?:[.,]\d+)?
      | \[?[IWEF]\d{4}\ \d\d:\d\d:\d\d\.\d+\ \d+\ [^\]\s]+:\d+\]
      | \[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|SUCCESS)\]?:?
      | [\w.]+:[\w<>.]+:\d+ | (?-x:\[RANK \d+\]|\[rank: ?\d+\])
      | (?:root|train|trainer|__main__|(?!\S+\.(?:safetensors|bin|pt|json)\b)[a-z_]+(?:\.[a-z_]+)+)(?=\ *[-:|])
      )\s*(?:[-|]\s+|:\s*)*)+""",
    re.VERBOSE,
)
# A progress bar has no newline, so a traceback may follow on its line; `python -u` writes a text and its newline
# separately, so two lines of JSON may share one.
GLUED = re.compile(
    r"(?<=[^\s:])(?=\[(?:rank|default|trainer|worker)\d{1,6}\]:)"
    r"|(?<=[^\s:])(?=Traceback \(most recent call last\):$)"
    r'|(?<=\})(?=\{"[a-z_]+": )'
)
JSON_RANK = re.compile(r'\A\{.{0,200}?"(?:global_)?rank": ?"?(\d{1,5})\b')
JSON_TIME = re.compile(r'\A\{.{0,200}?"(?:ts|time|timestamp)": ?(1\d{9}(?:\.\d+)?)')
SPOKEN_RANK = re.compile(
    r"\A\W{0,3}(?:global[ _])?(?:rank|worker|process|进程)[ =:#_]{0,2}(\d{1,5})\b(?!\s*[:,]?\s*(?:failed|exit))"
    r"|\A\[r?(\d{1,4})\](?=\s)|\A\W{0,3}第 ?(\d{1,5}) ?号?(?:卡|进程)",
    re.IGNORECASE,
)
BRACKETED = 2  # group of SPOKEN_RANK that only counts after the header of a logger
LONGEST = 4096  # characters of a line
MOST_PIECES = 2000  # of a line with carriage returns; the last ones are read


class StoryLine(NamedTuple):
    """`order` counts the lines of all logs; within one merged log, it is a clock that every line has.

    `text` has no prefixes; `message` also has no logger's header.
    """

    source: str
    number: int
    order: int
    rank: int | None
    time: float | None
    text: str
    message: str

    @property
    def evidence(self) -> Line:
        return Line(self.source, self.number, self.text.strip()[:LONGEST_EVIDENCE], self.rank, self.time)


def read_lines(excerpts: Iterable[Excerpt]) -> Iterator[StoryLine]:
    """All nonblank lines, log by log."""
    order = 0
    for excerpt in excerpts:
        for number, line in excerpt.lines():
            for piece in _pieces(line):
                order += 1
                yield _line(excerpt, number, order, piece)


def _pieces(line: str) -> Iterator[str]:
    """The texts that a terminal would have shown one after the other."""
    for part in line.split("\r")[-MOST_PIECES:] if "\r" in line else (line,):
        part = part[:LONGEST]
        if "]:" in part or "Traceback" in part or "}{" in part:
            yield from (piece for piece in GLUED.split(part) if piece.strip())
        elif part.strip():
            yield part


def _line(excerpt: Excerpt, number: int, order: int, piece: str) -> StoryLine:
    parsed = parse_prefix(piece, excerpt.written, excerpt.rank)
    header = HEADER.match(parsed.text)
    message = parsed.text[header.end() :] if header else parsed.text
    rank, time = parsed.rank, parsed.time
    if rank is None:
        rank = _own_rank(message, has_header=header is not None)
    if time is None and message.startswith("{") and (clock := JSON_TIME.match(message)):
        time = float(clock[1])
    time = time - excerpt.ahead_s if time is not None else None
    return StoryLine(excerpt.source, number, order, rank, time, parsed.text.rstrip(), message.rstrip())


def _own_rank(message: str, *, has_header: bool) -> int | None:
    match = JSON_RANK.match(message) if message.startswith("{") else SPOKEN_RANK.match(message)
    if match is None or (match.lastindex == BRACKETED and match.re is SPOKEN_RANK and not has_header):
        return None
    return int(match[match.lastindex or 1])

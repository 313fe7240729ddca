"""The evidence of a diagnosis: cited lines, each with the lines around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kb.diagnose.evidence import DERIVED_PREFIX, LONGEST_EVIDENCE, Line
from kb.diagnose.scan.log_prefix import strip_escapes

from .log_form import UploadedLog

AROUND = 2  # lines on either side
PIECE = 1 << 20  # bytes read at once
LONGEST_READ = 4096  # bytes of a line; the rest is skipped

Texts = Mapping[tuple[str, int], str]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a log; `number` counts from 1, and is 0 for an observation."""

    number: int
    text: str
    rank: int | None
    is_cited: bool


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Consecutive lines of one log."""

    source: str
    rows: tuple[Row, ...]


def texts(logs: Iterable[UploadedLog], lines: Iterable[Line]) -> Texts:
    """The cited lines and their neighbours by log and number. The logs are read again as far as needed."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for line in lines:
        if line.number:
            numbers[line.source].update(range(line.number - AROUND, line.number + AROUND + 1))
    return {
        (log.name, number): text
        for log in logs
        if log.name in numbers
        for number, text in _read_lines(log, numbers[log.name])
    }


def _read_lines(log: UploadedLog, numbers: set[int]) -> Iterator[tuple[int, str]]:
    """The lines with these numbers, read piece by piece: a hostile log has millions of lines before a cited one."""
    pending, number, start = sorted((line for line in numbers if line > 0), reverse=True), 1, b""
    with log.stream().open() as stream:
        while pending and (piece := stream.read(PIECE)):
            ends = piece.count(b"\n")
            if pending[-1] < number + ends:
                lines = (start + piece).split(b"\n")
                while pending and pending[-1] < number + ends:
                    yield pending[-1], _text(lines[pending.pop() - number])
            start = (piece[piece.rfind(b"\n") + 1 :] if ends else start + piece)[:LONGEST_READ]
            number += ends
    if start and pending and pending[-1] == number:
        yield number, _text(start)


def _text(line: bytes) -> str:
    return strip_escapes(line[:LONGEST_READ]).decode("utf-8", "replace").rstrip()[:LONGEST_EVIDENCE]


def excerpts(lines: Iterable[Line], texts: Texts) -> list[Excerpt]:
    """The excerpts with these lines, where lines that are close together share one excerpt."""
    merged: list[Excerpt] = []
    for line in sorted(map(_without_number, lines), key=lambda line: (line.source, line.number)):
        rows = tuple(_rows(line, texts))
        last = merged[-1] if merged else None
        end = last.rows[-1].number if last and last.source == line.source else 0
        if last and end and line.number and end >= rows[0].number - 1:
            merged[-1] = Excerpt(line.source, _joined(last.rows, rows))
        else:
            merged.append(Excerpt(line.source, rows))
    return merged


def _without_number(line: Line) -> Line:
    """The line, without a number if it is an observation that kb derived from several lines."""
    is_derived = line.text.startswith(DERIVED_PREFIX)
    return replace(line, number=0, text=line.text.removeprefix(DERIVED_PREFIX)) if is_derived else line


def _rows(line: Line, texts: Texts) -> Iterator[Row]:
    if not line.number:
        yield Row(0, line.text, line.rank, True)
        return
    for number in range(line.number - AROUND, line.number):
        if (line.source, number) in texts:
            yield Row(number, texts[line.source, number], None, False)
    whole = texts.get((line.source, line.number), "")
    yield Row(line.number, whole if line.text in whole else line.text, line.rank, True)
    for number in range(line.number + 1, line.number + AROUND + 1):
        if (line.source, number) in texts:
            yield Row(number, texts[line.source, number], None, False)


def _joined(first: tuple[Row, ...], second: tuple[Row, ...]) -> tuple[Row, ...]:
    """The lines of both excerpts without duplicates; a line is cited if either excerpt cites it."""
    by_number = {row.number: row for row in (*first, *second)}
    by_number.update((row.number, row) for row in first if row.is_cited)
    return tuple(by_number[number] for number in sorted(by_number))

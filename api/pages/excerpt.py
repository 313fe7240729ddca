"""The lines that a diagnosis rests on, each with the lines around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kb.diagnose.evidence import DERIVED_PREFIX, LONGEST_EVIDENCE, Line
from kb.diagnose.scan.log_prefix import strip_escapes

from .log_form import UploadedLog

AROUND = 2  # lines on either side
PIECE = 1 << 20  # bytes that are read at once
LONGEST_READ = 4096  # bytes of a line; what comes after is passed over

Texts = Mapping[tuple[str, int], str]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a log; `number` counts from 1, 0 for a sentence of ours."""

    number: int
    text: str
    rank: int | None
    is_cited: bool


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of one log that follow each other."""

    source: str
    rows: tuple[Row, ...]


def texts(logs: Iterable[UploadedLog], lines: Iterable[Line]) -> Texts:
    """The cited lines and their neighbours by log and number, read again from the logs as far as is needed."""
    wanted: dict[str, set[int]] = defaultdict(set)
    for line in lines:
        if line.number:
            wanted[line.source].update(range(line.number - AROUND, line.number + AROUND + 1))
    return {
        (log.name, number): text for log in logs if log.name in wanted for number, text in _read(log, wanted[log.name])
    }


def _read(log: UploadedLog, wanted: set[int]) -> Iterator[tuple[int, str]]:
    """Piece by piece: in a hostile log there are millions of lines before the one that is wanted."""
    waiting, number, begun = sorted((one for one in wanted if one > 0), reverse=True), 1, b""
    with log.stream().open() as stream:
        while waiting and (piece := stream.read(PIECE)):
            ends = piece.count(b"\n")
            if waiting[-1] < number + ends:
                whole = (begun + piece).split(b"\n")
                while waiting and waiting[-1] < number + ends:
                    yield waiting[-1], _shown(whole[waiting.pop() - number])
            begun = (piece[piece.rfind(b"\n") + 1 :] if ends else begun + piece)[:LONGEST_READ]
            number += ends
    if begun and waiting and waiting[-1] == number:
        yield number, _shown(begun)


def _shown(line: bytes) -> str:
    return strip_escapes(line[:LONGEST_READ]).decode("utf-8", "replace").rstrip()[:LONGEST_EVIDENCE]


def excerpts(lines: Iterable[Line], texts: Texts) -> list[Excerpt]:
    """Lines near each other make one excerpt."""
    made: list[Excerpt] = []
    for line in sorted(map(_placed, lines), key=lambda line: (line.source, line.number)):
        rows = tuple(_rows(line, texts))
        last = made[-1] if made else None
        end = last.rows[-1].number if last and last.source == line.source else 0
        if last and end and line.number and end >= rows[0].number - 1:
            made[-1] = Excerpt(line.source, _joined(last.rows, rows))
        else:
            made.append(Excerpt(line.source, rows))
    return made


def _placed(line: Line) -> Line:
    """What kb concluded from several lines stands at none of them."""
    is_ours = line.text.startswith(DERIVED_PREFIX)
    return replace(line, number=0, text=line.text.removeprefix(DERIVED_PREFIX)) if is_ours else line


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
    """Both, each line once: as cited where one of them cites it."""
    by_number = {row.number: row for row in (*first, *second)}
    by_number.update((row.number, row) for row in first if row.is_cited)
    return tuple(by_number[number] for number in sorted(by_number))

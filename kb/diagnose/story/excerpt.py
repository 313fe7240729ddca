"""The parts of a log that the story of a job is read from; they are bounded, since a log may have a gigabyte.

The head and the tail are stored whole. From the rest, marked lines (tracebacks, failures, numbers that are not finite)
and a sample of each block are stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

HEAD, TAIL = 64 << 10, 256 << 10  # bytes of a log
MARKED = 1 << 20
SAMPLED = 64 << 10
SAMPLE = 4 << 10  # bytes per block
TOTAL = 8 << 20  # bytes of all logs
LEAST = 8 << 10  # bytes of the tail of a log, however many logs there are
LONGEST_LINE = 8 << 10  # bytes of a marked line


class Part(NamedTuple):
    """Consecutive lines; `number` is the number of the first line, from 1."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Parts of the log `source`, in order; they may overlap.

    `rank` is the rank of its file, `written` when the log was last written (seconds since the epoch), and `ahead_s` how
    far the clock of its node was ahead. `has_all_marks` is False if there were too many marked lines: what the parts do
    not contain may then still be in the log.
    """

    source: str
    rank: int | None
    written: float | None
    parts: tuple[Part, ...]
    has_all_marks: bool = True
    ahead_s: float = 0.0

    def lines(self) -> Iterator[tuple[int, str]]:
        """Each line once, with its number."""
        last = 0
        for part in self.parts:
            for number, line in enumerate(part.data.decode("utf-8", "replace").split("\n"), part.number):
                if number > last and line:
                    last = number
                    yield number, line


def share(sources: int) -> float:
    """The fraction of the bounds that each of `sources` logs may use."""
    return min(1.0, TOTAL / (HEAD + TAIL) / max(1, sources))


@dataclass
class ExcerptBuilder:
    """`add` the blocks of a log in order. `fraction` scales the bounds if there are many logs."""

    source: str
    rank: int | None
    written: float | None
    fraction: float = 1.0
    ahead_s: float = 0.0
    _parts: list[Part] = field(default_factory=list)
    _recent: deque[Part] = field(default_factory=deque)
    _recent_size: int = 0
    _head_size: int = 0
    _marked_size: int = 0
    _sampled_size: int = 0
    _has_all_marks: bool = True

    def add(self, block: bytes, number: int, marks: Iterable[tuple[int, int]]) -> None:
        """`block` begins at line `number`; `marks` are positions in it, sorted by their start."""
        head = self._add_head(block, number)
        self._add_marked(block, number, (mark for mark in marks if mark[1] > head))
        if not head:
            self._add_sample(block, number)
        self._add_tail(block, number)

    def build(self) -> Excerpt:
        parts = sorted([*self._parts, *self._tail()], key=lambda part: part.number)
        return Excerpt(self.source, self.rank, self.written, tuple(parts), self._has_all_marks, self.ahead_s)

    def _add_head(self, block: bytes, number: int) -> int:
        """Add the whole lines of the block that belong to the head; return how many bytes they are."""
        limit = int(HEAD * self.fraction)
        room = limit - self._head_size
        if room <= 0:
            return 0
        head = block if len(block) <= room else block[: block.rfind(b"\n", 0, room) + 1]
        if not head and not self._parts:
            head = block[:room]  # a log without a line end
        self._head_size = limit if len(head) < len(block) else self._head_size + len(head)
        if head:
            self._parts.append(Part(number, head))
        return len(head)

    def _add_marked(self, block: bytes, number: int, marks: Iterable[tuple[int, int]]) -> None:
        """Add whole marked lines, each with the line after it: the source line of a frame, or the exception."""
        counted = end = 0
        for first, last in marks:
            if last <= end:
                continue
            if self._marked_size >= MARKED * self.fraction:
                self._has_all_marks = False
                return
            start = max(end, block.rfind(b"\n", 0, max(0, first)) + 1)
            line_end = block.find(b"\n", min(len(block), last), last + LONGEST_LINE) + 1 or min(len(block), last)
            end = block.find(b"\n", line_end, line_end + LONGEST_LINE) + 1 or line_end
            number, counted = number + block.count(b"\n", counted, start), start
            self._parts.append(Part(number, block[start:end]))
            self._marked_size += end - start

    def _add_sample(self, block: bytes, number: int) -> None:
        if self._sampled_size < SAMPLED * self.fraction:
            sample = block[:SAMPLE]
            self._parts.append(Part(number, sample[: sample.rfind(b"\n") + 1]))
            self._sampled_size += len(sample)

    def _add_tail(self, block: bytes, number: int) -> None:
        """Keep the last blocks, whose end `build` copies, so that most blocks are never copied."""
        self._recent.append(Part(number, block))
        self._recent_size += len(block)
        while self._recent_size - len(self._recent[0].data) >= self._tail_size and len(self._recent) > 1:
            self._recent_size -= len(self._recent.popleft().data)

    @property
    def _tail_size(self) -> int:
        return max(LEAST, int(TAIL * self.fraction))

    def _tail(self) -> list[Part]:
        if not self._recent:
            return []
        number, data = self._recent[0].number, b"".join(part.data for part in self._recent)
        size = self._tail_size
        if len(data) > size:
            cut = data.find(b"\n", len(data) - size) + 1 or len(data) - size
            number, data = number + data.count(b"\n", 0, cut), data[cut:]
        return [Part(number, data)]

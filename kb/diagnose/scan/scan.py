"""Reads all inputs of a diagnosis, each according to its kind, into one `Scan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from kb.diagnose.evidence import DERIVED_PREFIX, Line
from kb.diagnose.inputs.bundle import Member, read_members
from kb.diagnose.inputs.formats import Kind, detect_kind
from kb.diagnose.inputs.rank_from_path import rank_from_path
from kb.diagnose.inputs.sources import Source, Stream
from kb.diagnose.inputs.streams import HEAD
from kb.diagnose.readers.capture_comparison import CaptureRecords
from kb.diagnose.readers.flight_dumps import FlightDumps
from kb.diagnose.readers.nccl_ras import read_ras_report
from kb.diagnose.readers.stacks import read_stacks
from kb.diagnose.readers.structured import LARGEST, MOST_VALUES, Unreadable
from kb.diagnose.readers.torchelastic_error import read_error_file
from kb.diagnose.scan.accumulator import Accumulator
from kb.diagnose.scan.log_scanner import Scanner
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.diagnose.story.excerpt import Excerpt, ExcerptBuilder, share
from kb.diagnose.story.story import read_story
from kb.diagnose.watchdog import derive_observations

PIECE = 1 << 20  # bytes of a log that are read at once

ReportProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the memory for dumps: bytes and values of each dump, and collectives of all together.

    If there are more collectives, the last ones of each dump are compared.
    """

    structured: int = LARGEST
    values: int = MOST_VALUES
    records: int = 1_000_000


def scan(
    inputs: Iterable[Source | Stream],
    matcher: Matcher,
    progress: ReportProgress = lambda _: None,
    limits: Limits = Limits(),
    count: int | None = None,
) -> Scan:
    """Scan all inputs in one pass; they may be generated. `count` is how many there are if `inputs` has no length.

    `progress` is called with the number of bytes of each step; an exception that it raises ends the scan.
    """
    known = len(inputs) if isinstance(inputs, Sized) else 1
    reader = _Reader(matcher, progress, limits, share(count or known))
    for source in inputs:
        reader.read_input(source)
    progress(0)
    return reader.conclude()


@dataclass
class _Reader:
    """Reads inputs one by one."""

    matcher: Matcher
    progress: ReportProgress
    limits: Limits
    fraction: float  # share of the bounds of an excerpt that each log may use
    excerpts: list[Excerpt] = field(default_factory=list)
    evidence: Accumulator = field(default_factory=Accumulator)
    records: CaptureRecords = field(default_factory=CaptureRecords)
    dumps: FlightDumps = field(init=False)

    def __post_init__(self) -> None:
        self.dumps = FlightDumps(self.limits.records)

    def read_input(self, source: Source | Stream | Member) -> None:
        self.evidence.sources += 1
        with source.open(self.evidence.problems.append) as stream:
            kind = detect_kind(stream.peek(HEAD)[:HEAD], source.name)
            if kind is Kind.TEXT:
                self._read_log(source, stream)
            elif kind is Kind.CAPTURE:
                for member in read_members(stream, source.name, self.limits.structured, self.evidence.problems.append):
                    self.read_input(member)
            elif kind in (Kind.BINARY, Kind.OWN):
                self.evidence.problems.append(f"{source.name}: is {kind.value} and was not read")
            else:
                data = stream.read(self.limits.structured + 1)
                self.progress(len(data))
                self._read_structured(source, kind, data)

    def conclude(self) -> Scan:
        """The scan, with the observations that need all inputs together."""
        self._observe(self.records.compare())
        self.evidence.problems += self.records.problems()
        self._observe(self.dumps.compare())
        self.evidence.problems += self.dumps.problems()
        self._observe(derive_observations(self.evidence.freeze()))
        story = read_story(self.excerpts)
        for fact in story.facts:
            if not fact.is_context:
                self.evidence.observations.append(fact.evidence)
            self._match_signatures(fact.evidence, begin=DERIVED_PREFIX)
        return replace(self.evidence.freeze(), story=story)

    def _read_log(self, source: Source | Stream | Member, stream: BinaryIO) -> None:
        rank = rank_from_path(source.name)
        excerpt = ExcerptBuilder(source.name, rank, source.modified, self.fraction, _ahead(source))
        scanner = Scanner(self.matcher, self.evidence, source.name, rank, source.modified, excerpt)
        while piece := stream.read(PIECE):
            self.evidence.add_file_rank(rank)
            scanner.feed(piece)
            self.progress(len(piece))
        scanner.close()
        self.excerpts.append(excerpt.build())
        if scanner.reports:
            text = scanner.reports.decode("utf-8", "replace")
            with suppress(Unreadable):  # a line looked like a stack, but there is none
                self._observe(read_stacks(text, source.name, rank))
            with suppress(Unreadable):
                self._observe(read_ras_report(text, source.name))

    def _read_structured(self, source: Source | Stream | Member, kind: Kind, data: bytes) -> None:
        self.evidence.bytes += len(data)
        try:
            if len(data) > self.limits.structured:
                raise Unreadable(f"it is larger than {self.limits.structured >> 20} MiB")
            if kind in (Kind.FLIGHT_PICKLE, Kind.FLIGHT_JSON):
                self.dumps.add(data, source.name, self.limits.values, _ahead(source))
            elif kind is Kind.CAPTURE_RECORD:
                self.records.add(data, source.name, self.limits.values)
            elif kind is Kind.ERROR_FILE:
                rank = rank_from_path(source.name)
                for line in read_error_file(data, source.name, rank, self.limits.values):
                    self._match(line)
            else:
                self._observe(read_ras_report(data, source.name, self.limits.values))
        except Unreadable as error:
            self.evidence.problems.append(f"{source.name}: {error}")

    def _observe(self, sentences: Iterable[Line]) -> None:
        """Match sentences that kb derived, and show them with the answer."""
        for line in sentences:
            self.evidence.observations.append(line)
            self._match(line)

    def _match(self, line: Line) -> None:
        self._match_signatures(line)
        self.evidence.add_failure(line)

    def _match_signatures(self, line: Line, begin: str = "") -> None:
        """Match patterns that start with `begin`; facts repeat exceptions that were matched where they were printed."""
        for pattern, match in self.matcher.matches(line.text):
            if pattern.text.startswith(begin):
                self.evidence.add_match(pattern, match.group(), line)


def _ahead(source: Source | Stream | Member) -> float:
    """How many seconds the clock of an input was ahead, if known, else 0."""
    return source.ahead_s if isinstance(source, Member) else 0.0

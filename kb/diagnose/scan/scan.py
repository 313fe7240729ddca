"""Reads everything that a diagnosis is given, each input in its way, into one `Scan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from kb.diagnose.evidence import Line, Scan
from kb.diagnose.inputs.formats import Kind, kind
from kb.diagnose.inputs.sources import Source, Stream
from kb.diagnose.inputs.streams import HEAD
from kb.diagnose.readers import flight_recorder, nccl_ras, stacks, torchelastic_error
from kb.diagnose.readers.flight_recorder import FlightDump
from kb.diagnose.readers.safe_unpickler import LARGEST, Unreadable
from kb.diagnose.scan.accumulator import Tally
from kb.diagnose.scan.log_scanner import Scanner
from kb.diagnose.scan.rank_attribution import rank_of
from kb.diagnose.scan.signature_matcher import Matcher
from kb.diagnose.watchdog import observations

PIECE = 1 << 20  # bytes of a log that are read at once

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What dumps may make of memory: bytes of each, and collectives of all together."""

    structured: int = LARGEST
    records: int = 5_000_000


def scan(
    sources: Iterable[Source | Stream],
    matcher: Matcher,
    progress: Progress = lambda _: None,
    limits: Limits = Limits(),
) -> Scan:
    """One pass over all sources; `progress` hears how many bytes each step read; scan raises what it raises."""
    tally = Tally()
    dumps: list[FlightDump] = []
    for source in sources:
        tally.sources += 1
        with source.open(tally.problems.append) as stream:
            found = kind(stream.peek(HEAD)[:HEAD], source.name)
            if found is Kind.TEXT:
                _read_log(source, stream, matcher, tally, progress)
            elif found in (Kind.BINARY, Kind.OWN):
                tally.problems.append(f"{source.name}: is {found.value} and was not read")
            else:
                data = stream.read(limits.structured + 1)
                progress(len(data))
                _read_structured(source, found, data, matcher, tally, dumps, limits)
    progress(0)
    return _concluded(tally, matcher, dumps)


def _concluded(tally: Tally, matcher: Matcher, dumps: list[FlightDump]) -> Scan:
    """With what only all sources together say."""
    for line in flight_recorder.lines(dumps):
        derive(line, matcher, tally)
    for line in observations(tally.scan()):
        derive(line, matcher, tally)
    return tally.scan()


def _read_log(source: Source | Stream, stream: BinaryIO, matcher: Matcher, tally: Tally, progress: Progress) -> None:
    scanner = Scanner(matcher, tally, source.name, rank_of(source.name), source.modified)
    while piece := stream.read(PIECE):
        tally.printed(rank_of(source.name))
        scanner.feed(piece)
        progress(len(piece))
    scanner.close()
    if scanner.reports:
        text = scanner.reports.decode("utf-8", "replace")
        with suppress(Unreadable):  # what looked like a stack was none
            for line in stacks.observations(text, source.name, rank_of(source.name)):
                derive(line, matcher, tally)
        with suppress(Unreadable):
            for line in nccl_ras.read(text, source.name):
                derive(line, matcher, tally)


def _read_structured(
    source: Source | Stream,
    found: Kind,
    data: bytes,
    matcher: Matcher,
    tally: Tally,
    dumps: list[FlightDump],
    limits: Limits,
) -> None:
    tally.bytes += len(data)
    try:
        if len(data) > limits.structured:
            raise Unreadable(f"it is larger than {limits.structured >> 20} MiB")
        if found in (Kind.FLIGHT_PICKLE, Kind.FLIGHT_JSON):
            if sum(len(dump.records) for dump in dumps) > limits.records:
                raise Unreadable(f"the dumps before it have more than {limits.records:,} collectives")
            dumps.append(flight_recorder.read(data, source.name))
        elif found is Kind.ERROR_FILE:
            for line in torchelastic_error.read(data, source.name, rank_of(source.name)):
                _match(line, matcher, tally)
        else:
            for line in nccl_ras.read(data, source.name):
                derive(line, matcher, tally)
    except Unreadable as error:
        tally.problems.append(f"{source.name}: {error}")


def derive(line: Line, matcher: Matcher, tally: Tally) -> None:
    """Match a sentence that no input has in these words, and show it with the answer."""
    tally.observations.append(line)
    _match(line, matcher, tally)


def _match(line: Line, matcher: Matcher, tally: Tally) -> None:
    for pattern, match in matcher.matches(line.text):
        tally.saw(pattern, match.group(), line)
    tally.failed(line)

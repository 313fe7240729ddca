"""The inputs of a diagnosis: files, folders, pipes and standard input, in a fixed order, each a stream of bytes.

A folder stands for all files below it that are neither hidden nor evidently binary. Links are followed, and a file
with several names counts once. If there are too many files, the last written are read, since they are nearest to the
failure; files below a link to another folder come after all others. `Sources.problems` says in sentences what was left
out, and by which rule.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kb.diagnose.inputs.directory import File, Identity, Listing, file_identity, list_files, printable_path
from kb.diagnose.inputs.formats import Kind, detect_kind
from kb.diagnose.inputs.streams import HEAD, Report, error_reason, read_file, read_pieces, read_stdin
from kb.errors import UsageError

MOST_FILES = 5_000  # files of one folder that are read
MOST_ENTRIES = 100_000  # directory entries of one folder that are looked at


@dataclass(frozen=True, slots=True)
class Source:
    """One input. `name` is its path as given (`-` is standard input); `modified` is in seconds since the epoch."""

    name: str
    path: str = ""
    modified: float | None = None
    is_pipe: bool = False

    def open(self, report: Report = lambda _: None) -> io.BufferedReader:
        """The bytes of the input: gzip and zstd decompressed, UTF-16 as UTF-8, never more than it contains now.

        Reading never raises: an error ends the stream and is passed to `report` as a sentence. `peek(HEAD)`
        returns the head for `detect_kind` without consuming it. A pipe waits for its writer.
        """
        return read_file(self.path, self.name, report, waits=self.is_pipe) if self.path else read_stdin(report)


@dataclass(frozen=True, slots=True)
class Stream:
    """An input that arrives in pieces and can be opened once. It is decompressed to at most `most` bytes."""

    name: str
    pieces: Iterator[bytes]
    modified: float | None = None
    most: int = sys.maxsize

    def open(self, report: Report = lambda _: None) -> io.BufferedReader:
        """Like `Source.open`, except that an exception from `pieces` reaches the reader."""
        return read_pieces(self.pieces, self.name, report, self.most)


@dataclass(frozen=True, slots=True)
class Sources:
    """The inputs to read, and sentences about those left out."""

    inputs: tuple[Source, ...]
    problems: tuple[str, ...]


def find_sources(paths: Sequence[str], most_files: int = MOST_FILES, most_entries: int = MOST_ENTRIES) -> Sources:
    """The inputs that command-line arguments name. Raises `UsageError` for an invalid one. Does not open pipes yet."""
    inputs: dict[Identity, Source] = {}
    problems: list[str] = []
    for path in paths:
        if path == "-":
            inputs.setdefault((-1, -1), Source("-"))
            continue
        status = _status(path)
        if stat.S_ISDIR(status.st_mode):
            chosen, left_out = _folder(path, most_files, most_entries)
            inputs |= {key: source for key, source in chosen.items() if key not in inputs}
            problems += left_out
        else:
            inputs.setdefault(file_identity(status), _file(path, status))
    return Sources(tuple(inputs.values()), tuple(problems))


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{printable_path(path)} cannot be read: {error_reason(error)}") from error


def _file(path: str, status: os.stat_result) -> Source:
    is_pipe = stat.S_ISFIFO(status.st_mode)
    if not is_pipe and not stat.S_ISREG(status.st_mode):
        hint = "`-` reads what a command prints: `dmesg | kb diagnose -`"
        raise UsageError(f"{printable_path(path)} is neither a file, a folder nor a pipe", hint)
    try:
        if not is_pipe:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        raise UsageError(f"{printable_path(path)} cannot be read: {error_reason(error)}") from error
    return Source(printable_path(path), path, None if is_pipe else status.st_mtime, is_pipe)


def _folder(path: str, most_files: int, most_entries: int) -> tuple[dict[Identity, Source], list[str]]:
    """The files of a folder to read, sorted by path, and sentences about the others."""
    listing = list_files(path, most_entries)
    left = deque(sorted(listing.files.items(), key=lambda item: _nearness(item[1])))
    chosen: dict[Identity, Source] = {}
    binary = 0
    while left and len(chosen) < most_files:
        key, file = left.pop()
        source = Source(printable_path(file.path), file.path, file.modified)
        kind, problem = _peek_kind(source)
        if problem:
            listing.problems.append(problem)
        elif kind is Kind.BINARY:
            binary += 1
        elif kind is not Kind.OWN:
            chosen[key] = source
    problems = [
        f"{printable_path(path)}: {sentence}" for sentence in _left_out(listing, most_entries, len(left), binary)
    ]
    if not chosen:
        raise UsageError(f"{printable_path(path)} holds no log", "; ".join(problems) or "it has no files")
    return dict(sorted(chosen.items(), key=lambda item: item[1].path)), problems


def _nearness(file: File) -> tuple[bool, float, str]:
    """The sort key of a file, the highest is read first: unlinked before linked, then the last written."""
    return not file.is_linked, file.modified, file.path


def _left_out(listing: Listing, most_entries: int, older: int, binary: int) -> Iterator[str]:
    if listing.is_cut:
        yield f"more than {most_entries:,} files and folders, the others were not looked at"
    if older:
        yield f"left out as older than what is read: {older:,}"
    if binary:
        yield f"left out as binary: {binary:,}"
    if listing.problems:
        yield f"left out as unreadable: {len(listing.problems):,}, the first is {listing.problems[0]}"


def _peek_kind(source: Source) -> tuple[Kind, str]:
    """The kind of a file, and the reason if none of it can be read. Later errors are reported when it is read."""
    problems: list[str] = []
    with source.open(problems.append) as stream:
        head = stream.peek(HEAD)
    return detect_kind(head, source.name), problems[0] if problems and not head else ""

"""The bytes of one input as a stream that never raises: decompressed, as UTF-8, up to the size at opening.

An error while reading (a truncated archive, a file that shrinks, a disk that fails) ends the stream early and is passed
to `report` as one sentence; the bytes before it are delivered.
"""

from __future__ import annotations

import codecs
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from gzip import GzipFile

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HEAD = 1 << 16  # bytes; `peek(HEAD)` of a stream from here returns the whole head, even of a pipe
GZIP = b"\x1f\x8b\x08"
ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes((low, 0x2A, 0x4D, 0x18)) for low in range(0x50, 0x60)))  # or a skippable frame
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Report = Callable[[str], None]


def read_file(path: str, name: str, report: Report, *, waits: bool = False) -> io.BufferedReader:
    """The stream of a regular file, or of a named pipe if the caller `waits` for its writer; else it never blocks."""
    # Without O_NONBLOCK, opening a file that has become a pipe since it was listed would wait for a writer.
    extra = 0 if waits else os.O_NONBLOCK
    try:
        file = io.FileIO(path, opener=lambda path, flags: os.open(path, flags | extra))
    except (OSError, ValueError) as error:
        report(f"{name}: cannot be read: {error_reason(error)}")
        return _stream(iter(()), name, report)
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode):
        return _stream(_read_until(file, status.st_size, name, report), name, report, file)
    if waits and stat.S_ISFIFO(status.st_mode):
        return _stream(_read_all(file.read, name, report), name, report, file)
    report(f"{name}: is no longer a regular file")
    file.close()
    return _stream(iter(()), name, report)


def read_stdin(report: Report) -> io.BufferedReader:
    """The stream of standard input, which stays open when the stream is closed."""
    return _stream(_read_all(sys.stdin.buffer.read, "-", report), "-", report)


def error_reason(error: Exception) -> str:
    """The system's error message without the path, which the caller's sentence already names."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def read_pieces(pieces: Iterator[bytes], name: str, report: Report, most: int) -> io.BufferedReader:
    """The stream of pieces of any length, decompressed like a file, but to at most `most` bytes."""
    return _stream(pieces, name, report, most=most)


class _PieceReader(io.RawIOBase):
    """Pieces of any length as a raw stream. It fills the whole buffer, so that a peek returns all there is."""

    def __init__(self, pieces: Iterator[bytes], below: io.IOBase | None) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self._below = below

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # io gives a memoryview
        filled = 0
        while filled < len(buffer):
            self._rest = self._rest or memoryview(next(self._pieces, b""))
            if not self._rest:
                break
            part = self._rest[: len(buffer) - filled]
            buffer[filled : filled + len(part)] = part
            self._rest = self._rest[len(part) :]
            filled += len(part)
        return filled

    def close(self) -> None:
        if self._below is not None:
            self._below.close()
        super().close()


def _stream(
    pieces: Iterator[bytes], name: str, report: Report, file: io.IOBase | None = None, most: int = sys.maxsize
) -> io.BufferedReader:
    raw: io.BufferedReader = io.BufferedReader(_PieceReader(pieces, file), HEAD)
    stream = raw
    magic = raw.peek(4)[:4]
    if magic.startswith(GZIP):
        blocks = _decompressed(GzipFile(fileobj=raw).read1, name, report, most)
        stream = io.BufferedReader(_PieceReader(blocks, raw), HEAD)
    elif magic in ZSTD:
        blocks = _decompressed(zstd.ZstdFile(raw).read1, name, report, most)
        stream = io.BufferedReader(_PieceReader(blocks, raw), HEAD)
    if stream.peek(2)[:2] in UTF16:
        return io.BufferedReader(_PieceReader(_as_utf8(stream), stream), HEAD)
    return stream


def _read_until(file: io.FileIO, size: int, name: str, report: Report) -> Iterator[bytes]:
    """The first `size` bytes, the size at opening, so that reading a growing log ends."""
    left = size

    def read(most: int) -> bytes | None:
        return file.read(min(most, left))

    for block in _read_all(read, name, report):
        left -= len(block)
        yield block
    if left:
        report(f"{name}: {left:,} of {size:,} bytes are missing: it shrank or could not be read to its end")


def _read_all(read: Callable[[int], bytes | None], name: str, report: Report) -> Iterator[bytes]:
    try:
        while block := read(HEAD):
            yield block
    except (OSError, ValueError) as error:  # ValueError: standard input was closed
        report(f"{name}: reading it failed: {error_reason(error)}")


def _decompressed(read: Callable[[int], bytes], name: str, report: Report, most: int) -> Iterator[bytes]:
    """Decompressed blocks; `read` is a `read1`, which returns everything that was decompressed before any damage."""
    left = most
    try:
        while block := read(HEAD):
            if len(block) > left:
                report(f"{name}: unpacked, it is larger than {most:,} bytes; what comes after them was not read")
                yield block[:left]
                return
            left -= len(block)
            yield block
    except EOFError:
        report(f"{name}: the compressed data ends too early; what came before the end is read")
    except (OSError, zlib.error, zstd.ZstdError) as error:
        report(f"{name}: the compressed data is damaged ({error_reason(error)}); what came before it is read")


def _as_utf8(stream: io.BufferedReader) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    while block := stream.read(HEAD):
        yield decoder.decode(block).encode()

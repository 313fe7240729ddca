"""The logs in a form. They stay in memory and are not written to disk, logged or sent on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, replace
from itertools import count

from fastapi import HTTPException
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from kb.diagnose.inputs.sources import Stream
from kb.errors import UsageError

from ..requests.upload import MOST_LOG_BYTES, MOST_UNPACKED

MOST_FILES = 64  # one for each rank
LONGEST_NAME = 200
PIECE = 64 << 10  # bytes; a scan can be stopped after each piece
PASTED = "pasted text"
HINT = "choose a log, or paste a part of one"


class InMemoryParser(MultiPartParser):
    """A parser that never writes files to disk, unlike Starlette's. The middleware limits the size of a body."""

    spool_max_size = 2 * MOST_LOG_BYTES


@dataclass(frozen=True, slots=True)
class UploadedLog:
    """One file as it was sent, possibly compressed, of which at most `most` bytes are unpacked.

    `name` is the sender's name for it, which is never opened here.
    """

    name: str
    data: bytes
    most: int = MOST_UNPACKED

    def stream(self) -> Stream:
        pieces = (self.data[at : at + PIECE] for at in range(0, len(self.data), PIECE))
        return Stream(self.name, pieces, most=self.most)


async def parse_log_form(headers: Headers, body: AsyncGenerator[bytes, None]) -> list[UploadedLog]:
    """The logs in a form. Raises `UsageError` for a form without a log, `HTTPException` (400) for a malformed form."""
    if not headers.get("content-type", "").startswith("multipart/form-data"):
        raise UsageError("this is not a form with a log", HINT)
    parser = InMemoryParser(headers, body, max_files=MOST_FILES, max_fields=8, max_part_size=MOST_LOG_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise HTTPException(400, f"the form cannot be read: {error.message}") from None
    try:
        logs = [log async for log in _logs(form)]
    finally:
        await form.close()
    if not logs:
        raise UsageError("the form has no log", HINT)
    return list(_with_shares(list(_with_unique_names(logs))))


async def _logs(form: FormData) -> AsyncIterator[UploadedLog]:
    for value in form.getlist("log"):
        if isinstance(value, UploadFile) and (data := await value.read()):
            yield UploadedLog((value.filename or "log")[:LONGEST_NAME], data)
    for value in form.getlist("text"):
        if isinstance(value, str) and value.strip():
            yield UploadedLog(PASTED, value.encode(errors="replace"))


def _with_unique_names(logs: list[UploadedLog]) -> Iterator[UploadedLog]:
    """The logs with unique names, since evidence cites a log by name."""
    taken: set[str] = set()
    for log in logs:
        name = next(name for name in _names(log.name) if name not in taken)
        taken.add(name)
        yield replace(log, name=name)


def _names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name} ({number})" for number in count(2))


def _with_shares(logs: list[UploadedLog]) -> Iterator[UploadedLog]:
    """The logs with limits in proportion to their sizes, so that all together unpack to no more than a single log."""
    size = sum(len(log.data) for log in logs)
    for log in logs:
        yield replace(log, most=MOST_UNPACKED * len(log.data) // size)

"""The logs that a form sends, in memory: they are not written to disk, logged or sent on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, replace
from itertools import count

from fastapi import HTTPException
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from kb.diagnose.inputs.sources import Stream
from kb.errors import UsageError

from ..routes.diagnose import MOST_BYTES, MOST_UNPACKED

MOST_FILES = 64  # the logs of so many ranks at once
LONGEST_NAME = 200
PIECE = 64 << 10  # bytes; after each of them a reader may be told to end
PASTED = "pasted text"
HINT = "choose a log, or paste a part of one"


class InMemory(MultiPartParser):
    """Starlette's parser, which keeps on disk what is larger than this. The front refuses a body of that size."""

    spool_max_size = 2 * MOST_BYTES


@dataclass(frozen=True, slots=True)
class Log:
    """One file as it was sent, perhaps compressed. `name` is what its sender calls it, and opens nothing here.

    `most` bytes of it are unpacked.
    """

    name: str
    data: bytes
    most: int = MOST_UNPACKED

    def stream(self) -> Stream:
        pieces = (self.data[at : at + PIECE] for at in range(0, len(self.data), PIECE))
        return Stream(self.name, pieces, most=self.most)


async def received(headers: Headers, body: AsyncGenerator[bytes, None]) -> list[Log]:
    """What a form holds. Raises `UsageError` when that is nothing, `HTTPException` for what cannot be read."""
    if not headers.get("content-type", "").startswith("multipart/form-data"):
        raise UsageError("this is no form with a log", HINT)
    parser = InMemory(headers, body, max_files=MOST_FILES, max_fields=8, max_part_size=MOST_BYTES)
    try:
        form = await parser.parse()
    except ClientDisconnect:
        raise HTTPException(400, "the client left before its log had arrived") from None
    except MultiPartException as error:
        raise HTTPException(400, f"the form cannot be read: {error.message}") from None
    try:
        found = [log async for log in _logs(form)]
    finally:
        await form.close()
    if not found:
        raise UsageError("there is no log in this form", HINT)
    return list(_with_shares(list(_named_apart(found))))


async def _logs(form: FormData) -> AsyncIterator[Log]:
    for value in form.getlist("log"):
        if isinstance(value, UploadFile) and (data := await value.read()):
            yield Log((value.filename or "log")[:LONGEST_NAME], data)
    for value in form.getlist("text"):
        if isinstance(value, str) and value.strip():
            yield Log(PASTED, value.encode(errors="replace"))


def _named_apart(logs: list[Log]) -> Iterator[Log]:
    """Evidence names its log: no two may be called alike."""
    taken: set[str] = set()
    for log in logs:
        name = next(name for name in _names(log.name) if name not in taken)
        taken.add(name)
        yield replace(log, name=name)


def _names(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name} ({number})" for number in count(2))


def _with_shares(logs: list[Log]) -> Iterator[Log]:
    """Together they may grow as one alone: each has a part of that, by its size."""
    size = sum(len(log.data) for log in logs)
    for log in logs:
        yield replace(log, most=MOST_UNPACKED * len(log.data) // size)

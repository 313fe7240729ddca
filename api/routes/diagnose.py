"""POST /v1/diagnose: the entries that explain a log, which is read while it arrives, and is not kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from queue import Full, Queue

from fastapi import APIRouter, HTTPException, Request
from starlette.requests import ClientDisconnect

from kb.diagnose.evidence import Scan
from kb.diagnose.inputs.sources import Stream
from kb.errors import UsageError

from ..requests.problems import documented
from ..schemas.diagnosis import DiagnosisDocument
from ..state.content import Content, Loaded
from ..state.scanning import begun

MOST_BYTES = 32 << 20  # of a body; the front sees to it
MOST_UNPACKED = 512 << 20  # bytes that are made of it: a hostile one grows by ten thousand, a log by ten
MOST_WAITING = 16  # pieces that have arrived and are not read yet
MEDIA_TYPES = ("text/plain", "application/octet-stream", "application/gzip", "application/zstd", "application/json")
BYTES = {"type": "string", "format": "binary"}

router = APIRouter(prefix="/v1", tags=["diagnose"])


@router.post(
    "/diagnose",
    operation_id="diagnose",
    summary="Find what made a job fail, from its log",
    response_model=DiagnosisDocument,
    responses=documented(408, 413, 415, 422, 503),
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "A log, a flight-recorder dump, stacks or an error file; also gzip or zstd. "
            f"Up to {MOST_BYTES >> 20} MB, of which {MOST_UNPACKED >> 20} MB are read when it is unpacked.",
            "content": {media: {"schema": {} if "json" in media else BYTES} for media in MEDIA_TYPES},
        }
    },
)
async def diagnose(request: Request, content: Loaded) -> DiagnosisDocument:
    """The answer of `kb diagnose --json`. The body is not written to disk, logged or sent on.

    When no entry explains it, up to three lines that report a failure are counted among the gaps, without names and
    secrets.
    """
    if request.headers.get("content-type", "").lower().lstrip().startswith("multipart/"):
        raise HTTPException(415, "a log is not a form; send it as it is: curl --data-binary @train.log")
    try:
        found = await _scanned(request.stream(), content)
    except ClientDisconnect:
        raise HTTPException(400, "the client left before its body had arrived") from None
    if not found.bytes and not found.problems:
        raise UsageError("the body is empty", "send the log as it is: curl --data-binary @train.log")
    answer = await content.diagnose(found)
    request.app.state.unanswered.note_diagnosis(answer)
    return DiagnosisDocument.model_validate(answer.to_json())


async def _scanned(stream: AsyncIterator[bytes], content: Content) -> Scan:
    body = _Body(await begun(stream))
    async with content.scanning.place:
        reading = content.scanning.begin([Stream("body", body.pieces(), most=MOST_UNPACKED)])
        reading.add_done_callback(body.leave_unread)
        try:
            await body.rest()
        finally:
            await body.end()
        return await reading


class _Body:
    """Carries a body from the event loop to the thread that reads it, a few pieces at a time."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._waiting: Queue[bytes] = Queue(MOST_WAITING)
        self._is_read = True

    async def rest(self) -> None:
        async for piece in self._stream:
            if piece:
                await self._put(piece)

    async def end(self) -> None:
        await self._put(b"")

    def leave_unread(self, _: object) -> None:
        """The reader has seen enough, for instance that it is no text: the rest is taken and dropped."""
        self._is_read = False

    async def _put(self, piece: bytes) -> None:
        while self._is_read:
            try:
                self._waiting.put_nowait(piece)
                return
            except Full:  # the reader is at work: it takes one soon
                await asyncio.sleep(0.01)

    def pieces(self) -> Iterator[bytes]:
        while piece := self._waiting.get():
            yield piece

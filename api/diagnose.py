"""POST /v1/diagnose: the entries that explain a log, read while it arrives and kept nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from queue import Full, Queue

from fastapi import APIRouter, HTTPException, Request
from starlette.requests import ClientDisconnect

from kb.diagnose.scan import scan
from kb.diagnose.source import Stream
from kb.errors import UsageError

from .content import Loaded
from .diagnosis_schemas import DiagnosisDocument
from .problems import documented

MOST_BYTES = 32 << 20
MOST_WAITING = 16  # pieces that have arrived and are not read yet
PATIENCE_S = 120.0  # for a body to arrive
MEDIA_TYPES = ("text/plain", "application/octet-stream", "application/gzip", "application/zstd", "application/json")

router = APIRouter(prefix="/v1", tags=["diagnose"])


@router.post(
    "/diagnose",
    operation_id="diagnose",
    summary="Find what made a job fail, from its log",
    response_model=DiagnosisDocument,
    responses=documented(408, 413, 422, 503),
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "A log, a flight-recorder dump, stacks or an error file; also gzip or zstd. Up to 32 MB.",
            "content": {media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA_TYPES},
        }
    },
)
async def diagnose(request: Request, content: Loaded) -> DiagnosisDocument:
    """The answer of `kb diagnose --json`. Nothing of the body is written to disk, logged or sent on."""
    if int(request.headers.get("content-length", "0") or 0) > MOST_BYTES:
        raise _too_large()
    body = _Body()
    async with content.diagnosing:
        scanning = asyncio.get_running_loop().run_in_executor(
            content.scanning, scan, [Stream("body", body.pieces())], content.matcher
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                await body.fill(request.stream())
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {PATIENCE_S:g} s") from None
        except ClientDisconnect:
            raise HTTPException(400, "the client left before its body had arrived") from None
        finally:
            await body.end()
        found = await scanning
    if not found.bytes:
        raise UsageError("the body is empty", "send the log as it is: curl --data-binary @train.log")
    answer = await content.diagnose(found)
    request.app.state.unanswered.note_diagnosis(answer)
    return DiagnosisDocument.model_validate(answer.to_json())


class _Body:
    """Carries the pieces of a body from the event loop to the thread that reads them, a few at a time."""

    def __init__(self) -> None:
        self._waiting: Queue[bytes] = Queue(MOST_WAITING)

    async def fill(self, stream: AsyncIterator[bytes]) -> None:
        size = 0
        async for piece in stream:
            size += len(piece)
            if size > MOST_BYTES:
                raise _too_large()
            if piece:
                await self._put(piece)

    async def end(self) -> None:
        await self._put(b"")

    async def _put(self, piece: bytes) -> None:
        while True:
            try:
                return self._waiting.put_nowait(piece)
            except Full:  # the reader is at work: it takes one soon
                await asyncio.sleep(0.002)

    def pieces(self) -> Iterator[bytes]:
        while piece := self._waiting.get():
            yield piece


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is larger than {MOST_BYTES >> 20} MB; `kb diagnose` reads files of any size")

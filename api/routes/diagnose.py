"""POST /v1/diagnose: the entries that explain a log, which is read while it arrives and not stored."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request

from kb.diagnose.diagnosis import MOST_LINES
from kb.diagnose.inputs.sources import Stream
from kb.diagnose.ranking import MOST_FINDINGS
from kb.errors import UsageError

from ..requests.problems import documented
from ..requests.upload import MOST_LOG_BYTES, MOST_UNPACKED, upload
from ..schemas.diagnosis import LIMIT, LINES, DiagnosisDocument
from ..state.application import application
from ..state.content import ServedContent

BYTES = {"type": "string", "format": "binary"}
DUMP = {"type": "object", "description": "A dump or an error file as it was written.", "additionalProperties": True}
MEDIA_TYPES: dict[str, dict[str, Any]] = {
    "text/plain": BYTES,
    "application/octet-stream": BYTES,
    "application/gzip": BYTES,
    "application/zstd": BYTES,
    "application/json": DUMP,  # an object, so that generated clients distinguish it from bytes by its class
}

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
            f"Up to {MOST_LOG_BYTES >> 20} MB, of which {MOST_UNPACKED >> 20} MB are read when it is unpacked.",
            "content": {media: {"schema": schema} for media, schema in MEDIA_TYPES.items()},
        }
    },
)
async def diagnose(
    request: Request,
    content: ServedContent,
    limit: Annotated[int, Query(ge=1, le=MOST_FINDINGS, description="At most this many findings.")] = LIMIT,
    lines: Annotated[
        int, Query(ge=1, le=MOST_LINES, description="At most this many lines of evidence, of each finding and list.")
    ] = LINES,
) -> DiagnosisDocument:
    """The best findings of `kb diagnose --json`, each with its fix. `omitted` counts what was left out.

    The body is not written to disk, logged or sent on.
    If no entry explains the log, up to three lines that report a failure are counted among the gaps, without names
    and secrets.
    """
    if request.headers.get("content-type", "").lower().lstrip().startswith("multipart/"):
        raise HTTPException(415, "a log is not a form; send it as it is: curl --data-binary @train.log")
    body = upload(request)
    await body.start()
    diagnosing = asyncio.ensure_future(content.diagnose([Stream("body", body.pieces(), most=MOST_UNPACKED)]))
    await asyncio.wait([diagnosing])
    failure = diagnosing.exception()  # before `drop`, which may fail: asyncio logs exceptions that nobody retrieved
    await body.drop()
    if failure:
        raise failure
    diagnosis = diagnosing.result()
    if not diagnosis.bytes and not diagnosis.problems:
        raise UsageError("the body is empty", "send the log as it is: curl --data-binary @train.log")
    application(request).gaps.add_diagnosis(diagnosis)
    return DiagnosisDocument.of(diagnosis, content.catalog, content.triage, f"{request.base_url}entries", limit, lines)

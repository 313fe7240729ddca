"""POST and GET /v1/reports: what verifications proved, sent by the nodes that ran them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from kb.errors import UsageError
from kb.sharing.shared_report import MAX_BYTES, MAX_WORD, PRINTABLE, SharedReport, to_shared_report
from kb.store import reports
from kb.store.reports import StoredReport
from kb.verify.verdict import Verdict

from ..log import log
from ..requests import paging
from ..requests.access import Reporter
from ..requests.paging import Cursor
from ..requests.problems import documented
from ..requests.report_body import parse_report
from ..schemas.content import ID
from ..schemas.reports import SHARED, Receipt, ReportDocument, ReportList, ReportPage
from ..state.content import Content, ServedContent, StoreDatabase

LISTING = "reports"
MOST_AT_ONCE = 100
LARGEST_NUMBER = 2**53 - 1  # that every reader of JSON takes for what it is

router = APIRouter(prefix="/v1", tags=["reports"])

IdempotencyKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        min_length=8,
        max_length=128,
        pattern=r"^[!-~]+$",
        description="Made up by the sender, once for each report: sent again with it, a report is not kept twice.",
        examples=["4f1c2f0e-9d0b-4d43-8a5c-0b7d4f6f2a11"],
    ),
]
EntryFilter = Annotated[str, Query(max_length=100, pattern=PRINTABLE, description="Only reports of this entry.")]
GpuFilter = Annotated[
    str,
    Query(
        max_length=MAX_WORD, pattern=PRINTABLE, description="Only from GPUs with this in their name.", examples=["H100"]
    ),
]
TorchFilter = Annotated[
    str,
    Query(
        max_length=MAX_WORD, pattern=PRINTABLE, description="Only under this torch: 2.7 is any 2.7.x.", examples=["2.7"]
    ),
]
VerdictFilter = Annotated[Verdict | None, Query(description="Only with this verdict.")]
Limit = Annotated[int, Query(ge=1, le=MOST_AT_ONCE, description="At most this many reports.")]
Number = Annotated[int, Path(ge=1, le=LARGEST_NUMBER, description="The number of a report.", examples=[17])]


@router.post(
    "/reports",
    operation_id="postReport",
    summary="Share what a verification proved",
    status_code=201,
    response_model=Receipt,
    responses={
        200: {
            "model": Receipt,
            "description": "This report was kept before.",
            "headers": {"Idempotent-Replayed": {"description": "`true`", "schema": {"type": "string"}}},
        },
        201: {"headers": {"Location": {"description": "Where the report is.", "schema": {"type": "string"}}}},
        **documented(400, 408, 413, 415, 422, 503),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": f"What `kb verify --report` sends; at most {MAX_BYTES >> 10} kB.",
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/SharedReport"}, "example": SHARED}
            },
        }
    },
)
async def post_report(request: Request, database: StoreDatabase, caller: Reporter, key: IdempotencyKey) -> JSONResponse:
    """Kept once, however often it is sent. The report is data: it is validated, redacted again and never run.

    Without an answer, or with 503, send it again with the same key: `kb verify --report` does that by itself.
    """
    report = await parse_report(request)
    sent = report.model_dump_json(exclude_unset=True)  # a default that a later version adds is nobody's change
    digest = hashlib.sha256(sent.encode()).hexdigest()
    clean = to_shared_report(report.model_dump(mode="json")).model_dump(mode="json")
    admitted = await run_in_threadpool(reports.add_shared, database, clean, caller.id, key, digest, request.state.id)
    receipt = Receipt(number=admitted.id, id=report.id, verdict=report.verdict)
    headers = {"Location": f"/v1/reports/{admitted.id}"} if admitted.is_new else {"Idempotent-Replayed": "true"}
    return JSONResponse(receipt.model_dump(mode="json"), 201 if admitted.is_new else 200, headers)


@router.get(
    "/reports",
    operation_id="listReports",
    summary="Read what verifications proved, on which machines",
    response_model=ReportPage,
    responses=documented(422, 503),
)
def list_reports(
    content: ServedContent,
    database: StoreDatabase,
    entry: EntryFilter = "",
    gpu: GpuFilter = "",
    torch: TorchFilter = "",
    verdict: VerdictFilter = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> ReportPage:
    """Newest first, those that pass all filters."""
    before = paging.number(LISTING, cursor)
    found = reports.page(
        database, entry=entry, gpu=gpu, torch=torch, verdict=verdict or "", limit=limit + 1, before=before
    )
    shown, following = paging.page(LISTING, found, limit, lambda kept: kept.id)
    return ReportPage(reports=tuple(_sent(shown, content)), next=following)


@router.get(
    "/reports/{number}",
    operation_id="getReport",
    summary="Read a report",
    response_model=ReportDocument,
    responses=documented(404, 422, 503),
)
def get_report(content: ServedContent, database: StoreDatabase, number: Number) -> ReportDocument:
    """What was shared of one verification."""
    found = [kept for kept in reports.page(database, limit=1, before=number + 1) if kept.id == number]
    for document in _sent(found, content):
        return document
    raise HTTPException(404)


@router.get(
    "/entries/{id}/reports",
    operation_id="listReportsOfEntry",
    summary="Read what verifications of an entry proved",
    response_model=ReportList,
    responses=documented(404, 422, 503),
)
def list_reports_of_entry(
    content: ServedContent,
    database: StoreDatabase,
    entry_id: Annotated[
        str, Path(alias="id", max_length=100, pattern=PRINTABLE, description="The id of an entry.", examples=[ID])
    ],
    limit: Limit = 20,
) -> ReportList:
    """Newest first: what nodes sent, and what was verified on the machine of this service itself.

    Reports of an entry that is gone are still here; an entry never verified has none.
    """
    sent = tuple(_sent(reports.page(database, entry=entry_id, limit=limit), content))
    known = {(one.started_at, one.probe_digest) for one in sent}  # by this machine, too, with `kb verify --report`
    own = _own(reports.history(database, entry_id, limit), content)
    found = [*sent, *(one for one in own if (one.started_at, one.probe_digest) not in known)]
    if not found:
        content.catalog.get(entry_id)
    newest = sorted(found, key=lambda report: report.started_at, reverse=True)
    return ReportList(id=entry_id, reports=tuple(newest[:limit]))


def _sent(found: Iterable[StoredReport], content: Content) -> Iterable[ReportDocument]:
    """Reports of others. One that another version of kb kept in another form is logged and left out."""
    digests = content.digests
    for kept in found:
        try:
            report = SharedReport.model_validate(kept.document, strict=False)
        except ValidationError as error:
            log.warning("report %d is not shown: %s", kept.id, error)
        else:
            yield ReportDocument.of(report, digests, content.probe_digests, kept.id, kept.received_at)


def _own(documents: Iterable[dict[str, object]], content: Content) -> Iterable[ReportDocument]:
    """Reports of this machine, whose documents tell more than may leave it."""
    digests = content.digests
    for document in documents:
        try:
            yield ReportDocument.of(to_shared_report(document), digests, content.probe_digests)
        except UsageError as error:
            log.warning("a report of %s is not shown: %s", document.get("id"), error)

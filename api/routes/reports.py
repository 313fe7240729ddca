"""POST and GET /v1/reports: reports of verifications, shared by the nodes that ran them."""

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
LARGEST_NUMBER = 2**53 - 1  # exact in every JSON parser

router = APIRouter(prefix="/v1", tags=["reports"])

IdempotencyKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        min_length=8,
        max_length=128,
        pattern=r"^[!-~]+$",
        description="Chosen by the sender for each report: a report that is sent again with it is stored once.",
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
    summary="Share the verdict of a verification",
    status_code=201,
    response_model=Receipt,
    responses={
        200: {
            "model": Receipt,
            "description": "This report was stored before.",
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
    """The report is stored once, however often it is sent. It is data: validated, redacted again, never run.

    If there is no response, or after 503, send it again with the same key, as `kb verify --report` does.
    """
    report = await parse_report(request)
    text = report.model_dump_json(exclude_unset=True)  # without defaults, as a later version may add more
    digest = hashlib.sha256(text.encode()).hexdigest()
    clean = to_shared_report(report.model_dump(mode="json")).model_dump(mode="json")
    admitted = await run_in_threadpool(reports.add_shared, database, clean, caller.id, key, digest, request.state.id)
    receipt = Receipt(number=admitted.id, id=report.id, verdict=report.verdict)
    headers = {"Location": f"/v1/reports/{admitted.id}"} if admitted.is_new else {"Idempotent-Replayed": "true"}
    return JSONResponse(receipt.model_dump(mode="json"), 201 if admitted.is_new else 200, headers)


@router.get(
    "/reports",
    operation_id="listReports",
    summary="Read verdicts, by machine",
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
    """Reports that pass all filters, newest first."""
    before = paging.number(LISTING, cursor)
    rows = reports.page(
        database, entry=entry, gpu=gpu, torch=torch, verdict=verdict or "", limit=limit + 1, before=before
    )
    rows, following = paging.page(LISTING, rows, limit, lambda report: report.id)
    return ReportPage(reports=tuple(_shared_documents(rows, content)), next=following)


@router.get(
    "/reports/{number}",
    operation_id="getReport",
    summary="Read a report",
    response_model=ReportDocument,
    responses=documented(404, 422, 503),
)
def get_report(content: ServedContent, database: StoreDatabase, number: Number) -> ReportDocument:
    """One shared report."""
    rows = [report for report in reports.page(database, limit=1, before=number + 1) if report.id == number]
    for document in _shared_documents(rows, content):
        return document
    raise HTTPException(404)


@router.get(
    "/entries/{id}/reports",
    operation_id="listReportsOfEntry",
    summary="Read the verdicts of an entry",
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
    """Reports that nodes sent, and those of this service's machine, newest first.

    Reports of a removed entry are kept; an entry that was never verified has none.
    """
    shared = tuple(_shared_documents(reports.page(database, entry=entry_id, limit=limit), content))
    keys = {(report.started_at, report.probe_digest) for report in shared}  # this machine may have sent its own
    own = _own_documents(reports.history(database, entry_id, limit), content)
    documents = [*shared, *(report for report in own if (report.started_at, report.probe_digest) not in keys)]
    if not documents:
        content.catalog.get(entry_id)
    newest = sorted(documents, key=lambda report: report.started_at, reverse=True)
    return ReportList(id=entry_id, reports=tuple(newest[:limit]))


def _shared_documents(rows: Iterable[StoredReport], content: Content) -> Iterable[ReportDocument]:
    """The documents of stored reports. Reports in a form of another version of kb are logged and omitted."""
    digests = content.digests
    for row in rows:
        try:
            report = SharedReport.model_validate(row.document, strict=False)
        except ValidationError as error:
            log.warning("report %d is left out: %s", row.id, error)
        else:
            yield ReportDocument.of(report, digests, content.probe_digests, row.id, row.received_at)


def _own_documents(documents: Iterable[dict[str, object]], content: Content) -> Iterable[ReportDocument]:
    """The reports of this machine, reduced to what may be shared."""
    digests = content.digests
    for document in documents:
        try:
            yield ReportDocument.of(to_shared_report(document), digests, content.probe_digests)
        except UsageError as error:
            log.warning("a report of %s is left out: %s", document.get("id"), error)

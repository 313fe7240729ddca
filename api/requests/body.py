"""A report as it arrives, and what must be in it. How large and how slow a body may be is the front's to say."""

from __future__ import annotations

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from kb.sharing.shared_report import SharedReport


async def arriving(request: Request) -> SharedReport:
    """The report of a request. Raises `RequestValidationError`, and `HTTPException` for a body that is none."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "a report is application/json")
    try:
        return SharedReport.model_validate_json(await request.body())
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from None

"""The report in the body of a request. The middleware limits its size and time."""

from __future__ import annotations

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from kb.sharing.shared_report import SharedReport


async def parse_report(request: Request) -> SharedReport:
    """The report in a body. Raises `RequestValidationError` if it is invalid, `HTTPException` (415) if not JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "a report must be application/json")
    try:
        return SharedReport.model_validate_json(await request.body())
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**problem, "loc": ("body", *problem["loc"])} for problem in problems]) from None

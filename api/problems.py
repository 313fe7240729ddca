"""Every error as an RFC 9457 problem document: what happened, what to do next, and nothing about the inside."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from kb.errors import IndexUnavailable, KbError, StoreUnavailable, UnknownEntry, UsageError

MEDIA_TYPE = "application/problem+json"
STATUS = {UnknownEntry: 404, UsageError: 422, IndexUnavailable: 503, StoreUnavailable: 503, KbError: 500}
RETRY_S = "1"
UNAVAILABLE = "this part of the service does not work at the moment; the log of the server says why"

log = logging.getLogger("kb.api")


class Problem(BaseModel):
    """RFC 9457, with three members of our own: `hint`, `nearest` and `errors`."""

    type: str = Field(examples=["urn:kb:problem:unknown-entry"])
    title: str = Field(examples=["Not Found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["no entry is called 'checkpoint-save'"])
    instance: str = Field(examples=["/v1/entries/checkpoint-save"])
    hint: str = Field("", description="What to do next; absent when there is nothing to say.")
    nearest: list[str] = Field([], description="Ids that may have been meant.")
    errors: list[dict[str, str]] = Field([], description="One `parameter` and `detail` for each invalid parameter.")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an operation that may end in these problems."""
    schema = Problem.model_json_schema()
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }


def install(app: FastAPI) -> None:
    app.add_exception_handler(KbError, _kb_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(Exception, _internal_error)


def _kb_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KbError)
    status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
    detail, hint = error.message, error.hint
    if isinstance(error, IndexUnavailable):
        return _problem(request, status, error.kind, detail, {"Retry-After": RETRY_S}, hint=hint)
    if status >= 500:  # the message may name files of this machine
        log.error("%s: %s", request.url.path, error.message)
        detail, hint = UNAVAILABLE, ""
    nearest = list(error.nearest) if isinstance(error, UnknownEntry) else []
    return _problem(request, status, error.kind, detail, hint=hint, nearest=nearest)


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = {
        404: f"nothing is at {request.url.path}",
        405: f"{request.method} does not work at {request.url.path}",
    }.get(error.status_code, str(error.detail))
    return _problem(request, error.status_code, "", detail, error.headers)


def _invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [
        {"parameter": str(one["loc"][-1]), "detail": str(one["msg"]).removeprefix("Value error, ")}
        for one in error.errors()
    ]
    detail = "; ".join(f"{one['parameter']}: {one['detail']}" for one in errors)
    return _problem(request, 422, "invalid-request", detail, errors=errors)


def _internal_error(request: Request, _: Exception) -> JSONResponse:
    """The traceback is in the log of the server, where Starlette sends the exception on to."""
    return _problem(request, 500, "", "something went wrong here; the log of the server says what")


def _problem(
    request: Request, status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> JSONResponse:
    problem = {
        "type": f"urn:kb:problem:{kind}" if kind else "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": quote(request.url.path),
        **{name: value for name, value in more.items() if value},
    }
    return JSONResponse(problem, status, headers, MEDIA_TYPE)

"""Errors as RFC 9457 problem documents: what happened and what to do next, without internals."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from kb.errors import (
    IndexUnavailable,
    KbError,
    KeyNeeded,
    NotAllowed,
    StoreUnavailable,
    TooManyRequests,
    UnknownEntry,
    UsageError,
)

from ..log import log
from ..state.application import application
from .accept import preferred

MEDIA_TYPE = "application/problem+json"
STATUS = {
    UnknownEntry: 404,
    UsageError: 422,
    KeyNeeded: 401,
    NotAllowed: 403,
    TooManyRequests: 429,
    IndexUnavailable: 503,
    StoreUnavailable: 503,
    KbError: 500,
}
PUBLIC = (UsageError, KeyNeeded, NotAllowed, TooManyRequests, IndexUnavailable)  # errors with messages for the client
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
RETRY_S = "1"
ROUTING = {404: "there is nothing at {path}", 405: "{method} is not supported at {path}"}
UNAVAILABLE = "this part of the service is not available at the moment; the server log says why"
INTERNAL = "internal error; the server log has the details"
NO_PAGES = ("/v1", "/mcp", "/healthz", "/readyz", "/metrics", "/openapi.json")  # for programs


class Problem(BaseModel):
    """RFC 9457, with three members of our own: `hint`, `nearest` and `errors`."""

    type: str = Field(examples=["urn:kb:problem:unknown-entry"])
    title: str = Field(examples=["Not Found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["no entry is called 'checkpoint-save'"])
    instance: str = Field(examples=["/v1/entries/checkpoint-save"])
    hint: str = Field("", description="What to do next; absent when there is no advice.")
    nearest: list[str] = Field([], description="Ids that may have been meant.")
    errors: list[dict[str, str]] = Field([], description="One `parameter` and `detail` for each invalid parameter.")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI `responses` of an operation that may end in these problems."""
    schema = Problem.model_json_schema()
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }


def install(app: FastAPI) -> None:
    """Answer errors of routes with problems. The middleware passes all other errors to `respond`."""

    async def handle(request: Request, error: Exception) -> Response:  # async, to run in the same thread
        return respond(request, error)

    for kind in (KbError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, handle)


def respond(request: Request, error: Exception) -> Response:
    """The response to any error: a problem document, or a page for a browser outside the API."""
    if isinstance(error, KbError):
        return _kb_error(request, error)
    if isinstance(error, HTTPException):
        return _http_error(request, error)
    if isinstance(error, RequestValidationError):
        return _invalid_request(request, error)
    if isinstance(error, ClientDisconnect):
        return _problem(request, 400, "", "the client disconnected before its body had arrived")
    log.error("%s %s", _id(request), type(error).__name__, exc_info=error)
    return _problem(request, 500, "", INTERNAL)


def _kb_error(request: Request, error: KbError) -> Response:
    status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
    detail, hint = error.message, error.hint
    if not isinstance(error, PUBLIC):  # its message may name files of this machine
        log.error("%s %s", _id(request), error.message)
        detail, hint = UNAVAILABLE, ""
    nearest = list(error.nearest) if isinstance(error, UnknownEntry) else []
    return _problem(request, status, error.kind, detail, _headers(error, status), hint=hint, nearest=nearest)


def _headers(error: KbError, status: int) -> dict[str, str]:
    if isinstance(error, TooManyRequests):
        return {"Retry-After": f"{error.retry_s:.0f}"}
    return {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": RETRY_S}}.get(status, {})


def _http_error(request: Request, error: HTTPException) -> Response:
    detail = str(error.detail)
    if detail == HTTPStatus(error.status_code).phrase:  # Starlette's own
        detail = ROUTING.get(error.status_code, detail).format(method=request.method, path=request.url.path)
    headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
    return _problem(request, error.status_code, "", detail, headers)


def _allowed(request: Request) -> str:
    """All methods of a path, collected from its routes, each of which knows only its own."""
    scopes = {method: {**request.scope, "method": method} for method in METHODS}
    routes = request.app.router.routes
    allowed = [
        method for method, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)
    ]
    return ", ".join(allowed).replace("GET", "GET, HEAD")  # the middleware turns HEAD into GET


def _invalid_request(request: Request, error: RequestValidationError) -> Response:
    errors = [
        {
            "parameter": "body" if problem["type"] == "json_invalid" else str(problem["loc"][-1]),
            "detail": str(problem["msg"]).removeprefix("Value error, "),
        }
        for problem in error.errors()
    ]
    detail = "; ".join(f"{problem['parameter']}: {problem['detail']}" for problem in errors)
    is_not_json = any(problem["loc"] == ("body",) for problem in error.errors()) and not _sends_json(request)
    hint = "send the body as JSON, with the header Content-Type: application/json" if is_not_json else ""
    return _problem(request, 422, "invalid-request", detail, hint=hint, errors=errors)


def _sends_json(request: Request) -> bool:
    return "json" in request.headers.get("content-type", "")


def _problem(
    request: Request, status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> Response:
    title = HTTPStatus(status).phrase
    if _wants_page(request):
        response = application(request).error_page(request, status, title, detail, more.get("hint", ""))
        response.headers.update(headers or {})
        return response
    problem = {
        "type": f"urn:kb:problem:{kind}" if kind else "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
        "instance": quote(request.url.path),
        **{name: value for name, value in more.items() if value},
    }
    return JSONResponse(problem, status, headers, MEDIA_TYPE)


def _wants_page(request: Request) -> bool:
    if request.url.path.startswith(NO_PAGES):
        return False
    return preferred(request.headers.get("accept", "*/*"), (MEDIA_TYPE, "text/html")) == "text/html"


def _id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("id", ""))

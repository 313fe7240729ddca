"""What every request goes through: request id, authentication, body limits, security headers, errors, log and metrics.

A single ASGI middleware does all of it, because each layer costs as much as a small search.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kb.errors import IndexUnavailable

from ..state.metrics import Metrics
from ..state.requester import Requester, requester
from .accept import preferred
from .access import ANONYMOUS, SAFE, AccessControl, Caller
from .headers import Headers, find_key
from .problems import respond
from .rate_limits import client_network
from .upload import Upload, wait_until_gone

LEAST_COMPRESSED = 1000  # bytes. No response contains a secret, which compression could reveal (BREACH).
CLIENT_LEFT = 499  # as logged by nginx
MONITORED = frozenset({"/healthz", "/readyz", "/metrics"})  # requested by machines every few seconds
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{8,64}")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
]
NO_STORE = (b"cache-control", b"no-store")
ENDING = IndexUnavailable("the service is shutting down", "try again in a moment")

log = logging.getLogger("kb.requests")


class RequestMiddleware:
    """The middleware of one application."""

    def __init__(self, app: ASGIApp, access: AccessControl, metrics: Metrics) -> None:
        self._app = app
        self._compressing = GZipMiddleware(app, minimum_size=LEAST_COMPRESSED, compresslevel=5)
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, method = time.perf_counter(), scope["method"]
        if method == "HEAD":  # the server omits the body
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["id"], state["caller"], state["is_signed_in"] = _request_id(headers), None, False
        if b"cookie" in headers:
            state["is_signed_in"] = find_key(headers)[1]
            scope["headers"] = _without_cookies(scope["headers"])
        response = _Response(send, state)
        try:
            await self._respond(scope, headers, receive, response)
        except Exception as error:
            if response.status:  # already partly sent: break the connection, so that it does not look complete
                raise
            await respond(Request(scope, receive), error)(scope, receive, response.send)
        except asyncio.CancelledError:  # the server is ending, and the grace period for requests is over
            if not response.status:
                await respond(Request(scope, receive), ENDING)(scope, receive, response.send)
        finally:
            self._record(method, scope, response, time.perf_counter() - started)

    async def _respond(self, scope: Scope, headers: Headers, receive: Receive, response: _Response) -> None:
        if b"content-type" in headers:
            _refuse_form_charset(scope["headers"])
        leave: Callable[[], Awaitable[None]] = partial(wait_until_gone, receive)
        if b"content-length" in headers or b"transfer-encoding" in headers or scope["method"] not in SAFE:
            upload = scope["state"]["upload"] = Upload(receive, scope["path"], headers)
            await upload.check_length()
            receive, leave = upload.receive, upload.leave
        caller = scope["state"]["caller"] = await self._access.admit(scope, headers)
        requester.set(Requester(_queue_name(caller, scope), leave))
        encodings = headers.get(b"accept-encoding", b"")
        takes_gzip = b"gzip" in encodings and preferred(encodings.decode("latin-1"), ("gzip",))
        await (self._compressing if takes_gzip else self._app)(scope, receive, response.send)

    def _record(self, method: str, scope: Scope, response: _Response, seconds: float) -> None:
        """Log and count a request, without the query, body, key and path that the client sent."""
        method = method if method in METHODS else "other"
        route, caller, status = _template(scope), scope["state"]["caller"], response.status or CLIENT_LEFT
        self._metrics.count_request(route, method, status, seconds)
        level = logging.DEBUG if route in MONITORED and status < 500 else logging.INFO
        if log.isEnabledFor(level):
            fields: dict[str, Any] = {
                "request_id": scope["state"]["id"],
                "method": method,
                "route": route,
                "status": status,
                "duration_ms": round(seconds * 1000, 2),
                "bytes": response.bytes,
                "caller": caller.id if caller else "",
            }
            log.log(level, "%s %s %d", method, route, status, extra=fields)


class _Response:
    """Passes a response on with the headers that every response has, and records its status and size."""

    __slots__ = ("_send", "_state", "bytes", "status")

    def __init__(self, send: Send, state: Mapping[str, Any]) -> None:
        self._send = send
        self._state = state
        self.status = 0
        self.bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message["headers"] = [*message.get("headers", ()), *SECURITY]
            headers.append((b"x-request-id", self._state["id"].encode()))
            if quota := self._state.get("quota"):
                headers += quota.headers()
            if not any(name == b"cache-control" for name, _ in headers):
                headers.append(NO_STORE)
        elif message["type"] == "http.response.body":
            self.bytes += len(message.get("body", b""))
        await self._send(message)


def _request_id(headers: Headers) -> str:
    """The id that the client or proxy sent, if it is well-formed, so that its log and ours can be joined."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else uuid4().hex


def _queue_name(caller: Caller | None, scope: Scope) -> str:
    """The name under which a caller waits in queues: a key, or an anonymous client."""
    if caller and caller is not ANONYMOUS:
        return caller.id
    return client_network(scope["client"][0]) if scope.get("client") else ""


def _without_cookies(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without cookies, which only the middleware needs: http.cookies parses a crafted 120 kB for 30 s."""
    return [header for header in headers if header[0] != b"cookie"]


def _refuse_form_charset(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse forms not in UTF-8 (RFC 7578, 5.1.2). Starlette would decode any charset: 1 MB of punycode takes hours."""
    for name, value in headers:
        if name == b"content-type" and b"charset" in value.lower() and value.lower().lstrip().startswith(b"multipart/"):
            raise HTTPException(415, "a form is UTF-8 and must name no charset", {"Connection": "close"})


def _template(scope: Scope) -> str:
    """The route, such as /v1/entries/{id}, or the folder of a mounted application; `-` if no route matches."""
    route = scope.get("route")
    path = getattr(route, "path_format", "") or getattr(route, "path", "")
    return path or "-"

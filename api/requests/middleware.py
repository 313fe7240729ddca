"""What every request passes: a number, who asks, limits of its body, headers that browsers obey, log and counts.

One ASGI middleware around everything, since each layer costs as much as a small search.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..routes.diagnose import MOST_BYTES as LOGS
from ..routes.metrics import Metrics
from .accept import preferred
from .access import Gate
from .headers import Headers, key_in
from .problems import respond

MOST_BYTES = {"/v1/diagnose": LOGS, "/diagnose": LOGS, "/mcp": 4 << 20, "/v1/reports": 64 << 10}
MOST_BYTES_ELSEWHERE = 256 << 10
WORTH_PACKING = 1000  # bytes. An answer to a secret would not be packed (BREACH); there is none.
BODY_S = 120.0  # in which a body has to arrive
STALL_S, LEAST_RATE = 10.0, 32 << 10  # seconds that it may pause, and bytes in a second by which it earns more
CLIENT_LEFT = 499  # in the log, as nginx has it
WATCHING = frozenset({"/healthz", "/readyz", "/metrics"})  # asked every few seconds by machines
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
NOT_KEPT = (b"cache-control", b"no-store")

log = logging.getLogger("kb.requests")


class Front:
    """The middleware. It needs `gate` and `metrics` of the application."""

    def __init__(self, app: ASGIApp, gate: Gate, metrics: Metrics) -> None:
        self._app = app
        self._packing = GZipMiddleware(app, minimum_size=WORTH_PACKING, compresslevel=5)
        self._gate = gate
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, method = time.perf_counter(), scope["method"]
        if method == "HEAD":  # who wrote to the client leaves the body out
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["id"], state["caller"], state["is_signed_in"] = _request_id(headers), None, False
        if b"cookie" in headers:
            state["is_signed_in"] = key_in(headers)[1]
            scope["headers"] = _without_cookies(scope["headers"])
        answer = _Answer(send, state["id"])
        try:
            await self._let_in(scope, headers, receive, answer)
        except Exception as error:
            if answer.status:  # a part of it is sent: the connection breaks, so that nobody takes that for all
                raise
            await respond(Request(scope, receive), error)(scope, receive, answer.send)
        finally:
            self._note(method, scope, answer, time.perf_counter() - started)

    async def _let_in(self, scope: Scope, headers: Headers, receive: Receive, answer: _Answer) -> None:
        if b"content-type" in headers:
            _demand_plain_forms(scope["headers"])
        if b"content-length" in headers or b"transfer-encoding" in headers:
            receive = _Body(receive, _most_bytes(scope["path"]), headers).receive
        scope["state"]["caller"] = await self._gate.admit(scope, headers)
        packings = headers.get(b"accept-encoding", b"")
        takes_packed = b"gzip" in packings and preferred(packings.decode("latin-1"), ("gzip",))
        await (self._packing if takes_packed else self._app)(scope, receive, answer.send)

    def _note(self, asked: str, scope: Scope, answer: _Answer, seconds: float) -> None:
        """One line and one count. Neither the query nor the body nor a key is in it, nor a path of a client."""
        method = asked if asked in METHODS else "other"
        route, caller, status = _template(scope), scope["state"]["caller"], answer.status or CLIENT_LEFT
        self._metrics.observe(route, method, status, seconds)
        level = logging.DEBUG if route in WATCHING and status < 500 else logging.INFO
        if log.isEnabledFor(level):
            fields: dict[str, Any] = {
                "request_id": answer.request_id,
                "method": method,
                "route": route,
                "status": status,
                "duration_ms": round(seconds * 1000, 2),
                "bytes": answer.bytes,
                "caller": caller.id if caller else "",
            }
            log.log(level, "%s %s %d", method, route, status, extra=fields)


class _Answer:
    """Sends an answer on, with the headers that every answer has, and remembers what was sent."""

    __slots__ = ("_send", "bytes", "request_id", "status")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0
        self.bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message["headers"] = [*message.get("headers", ()), *SECURITY]
            headers.append((b"x-request-id", self.request_id.encode()))
            if not any(name == b"cache-control" for name, _ in headers):
                headers.append(NOT_KEPT)
        elif message["type"] == "http.response.body":
            self.bytes += len(message.get("body", b""))
        await self._send(message)


class _Body:
    """Hands a body on while it is neither too large nor too slow. Raises `HTTPException` (413, 408)."""

    def __init__(self, receive: Receive, most: int, headers: Headers) -> None:
        self._receive = receive
        self._most = most
        self._waited_s = 0.0  # for the client alone: others may be read before
        self._left = most
        self._is_whole = False
        if int(headers.get(b"content-length", b"0")) > most:
            raise self._too_large()

    async def receive(self) -> Message:
        if self._is_whole:  # who waits on waits for the client to leave
            return await self._receive()
        began, most_s = time.monotonic(), min(BODY_S, STALL_S + (self._most - self._left) / LEAST_RATE)
        try:
            async with asyncio.timeout(max(0.0, most_s - self._waited_s)):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, "the body arrives too slowly", {"Connection": "close"}) from None
        self._waited_s += time.monotonic() - began
        self._is_whole = message["type"] != "http.request" or not message.get("more_body")
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise self._too_large()
        return message

    def _too_large(self) -> HTTPException:
        """The rest of the body is not read: the connection ends."""
        size = f"{self._most >> 20} MB" if self._most >> 20 else f"{self._most >> 10} kB"
        more = "; `kb diagnose` reads files of any size" if self._most == LOGS else ""
        return HTTPException(413, f"the body is larger than {size}{more}", {"Connection": "close"})


def _request_id(headers: Headers) -> str:
    """That of the client or proxy where it has a sane form, so that its log and ours can be joined."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else uuid4().hex


def _without_cookies(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """For the application, which has no use for cookies and would parse them: http.cookies takes half a minute for
    120 kB that somebody made for it."""
    return [header for header in headers if header[0] != b"cookie"]


def _demand_plain_forms(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """A form is UTF-8 (RFC 7578, 5.1.2). Starlette decodes it as its head says, and punycode takes hours for 1 MB."""
    for name, value in headers:
        if name == b"content-type" and b"charset" in value.lower() and value.lower().lstrip().startswith(b"multipart/"):
            raise HTTPException(415, "a form is UTF-8 and names no charset", {"Connection": "close"})


def _most_bytes(path: str) -> int:
    return MOST_BYTES.get(path, MOST_BYTES_ELSEWHERE)


def _template(scope: Scope) -> str:
    """/v1/entries/{id}; what is mounted by its folder; `-` for what is nowhere."""
    route = scope.get("route")
    path = getattr(route, "path_format", "") or getattr(route, "path", "")
    return path or "-"

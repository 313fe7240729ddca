"""The body of a request, limited in size and time, and read while it arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from contextlib import suppress

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from ..state.requester import never
from .headers import Headers

MOST_LOG_BYTES = 32 << 20
MOST_UNPACKED = 512 << 20  # bytes; a log unpacks to ten times its size, a hostile one to ten thousand times
MOST_BYTES = {"/v1/diagnose": MOST_LOG_BYTES, "/diagnose": MOST_LOG_BYTES, "/mcp": 4 << 20, "/v1/reports": 64 << 10}
MOST_BYTES_ELSEWHERE = 256 << 10
BODY_S = 120.0  # time limit for a body to arrive
STALL_S, LEAST_RATE = 10.0, 32 << 10  # seconds that it may pause, and bytes per second that earn it more
MOST_DRAINED, DRAIN_S = 8 << 20, 5.0  # how much of a refused body is read, and for how long
PIECE = 64 << 10  # bytes per piece; the last piece is shorter


class Upload:
    """One body. The application uses `receive`; a route that reads a body while it arrives uses `pieces` or `stream`.

    At most one piece is read ahead, so a client whose body is not needed yet has to wait. All methods raise
    `HTTPException` for a body that is too slow (408) or too large (413), and `ClientDisconnect`.
    """

    def __init__(self, receive: Receive, path: str, headers: Headers) -> None:
        self._receive = receive
        self._most = MOST_BYTES.get(path, MOST_BYTES_ELSEWHERE)
        self._waited_s = 0.0  # only for the client; time in which other bodies are read does not count
        self._left = self._most
        self._has_ended = False
        self._start = b""
        self._ahead: Future[bytes] | None = None
        self._length = int(headers.get(b"content-length", b"0"))
        self._waits_for_us = b"expect" in headers

    async def check_length(self) -> None:
        """Raise `HTTPException` if the announced length is too large."""
        if self._length > self._most:
            self._has_ended = True
            if self._length <= MOST_DRAINED and not self._waits_for_us:
                await self._drain()
            raise self._too_large()

    async def receive(self) -> Message:
        """The next ASGI message. After the end of the body, this waits until the client leaves."""
        if self._has_ended:
            return await self._receive()
        began, allowed_s = time.monotonic(), min(BODY_S, STALL_S + (self._most - self._left) / LEAST_RATE)
        try:
            async with asyncio.timeout(max(0.0, allowed_s - self._waited_s)):
                message = await self._receive()
        except TimeoutError:
            self._has_ended = True
            raise HTTPException(408, "the body arrives too slowly", {"Connection": "close"}) from None
        self._waited_s += time.monotonic() - began
        self._left -= len(message.get("body", b""))
        self._has_ended = self._left < 0 or message["type"] != "http.request" or not message.get("more_body")
        if self._left < 0:
            await self._drain()
            raise self._too_large()
        return message

    async def leave(self) -> None:
        """Wait until the client has left. Never returns while the body arrives: then its reader gets the error."""
        if not self._has_ended:
            await never()
        await wait_until_gone(self._receive)

    async def start(self) -> None:
        """Wait for the first piece, so that a slow client does not occupy a thread before it."""
        self._start = await self._read()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body, for the event loop."""
        while piece := await self._next():
            yield piece

    def pieces(self) -> Iterator[bytes]:
        """The body after `start`, for a thread, which blocks until a piece arrives. Call it in the event loop."""
        return self._pieces(asyncio.get_running_loop())

    async def drop(self) -> None:
        """Receive the unread rest: a client that is still sending would not see its answer."""
        if self._ahead:
            await asyncio.wrap_future(self._ahead)
        while await self._next():
            pass

    def _pieces(self, loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
        """The pieces of the body. The next one is received while the caller works on the current one."""
        piece, self._start = self._start, b""
        while piece:
            self._ahead = None if self._has_ended else asyncio.run_coroutine_threadsafe(self._read(), loop)
            yield piece
            piece = self._ahead.result() if self._ahead else b""

    async def _next(self) -> bytes:
        piece, self._start = self._start, b""
        return piece or await self._read()

    async def _read(self) -> bytes:
        """Read a piece; b"" at the end."""
        piece = bytearray()
        while len(piece) < PIECE and not self._has_ended:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece += message.get("body", b"")
        return bytes(piece)

    async def _drain(self) -> None:
        """Receive some of the rest: closing a connection with unread bytes would lose the answer."""
        left = MOST_DRAINED
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while left > 0:
                    message = await self._receive()
                    if not message.get("more_body"):
                        return
                    left -= len(message.get("body", b""))

    def _too_large(self) -> HTTPException:
        """The error for a body that is too large. It closes the connection, since the rest is not read."""
        size = f"{self._most >> 20} MB" if self._most >> 20 else f"{self._most >> 10} kB"
        more = "; `kb diagnose` reads files of any size" if self._most == MOST_LOG_BYTES else ""
        return HTTPException(413, f"the body is larger than {size}{more}", {"Connection": "close"})


async def wait_until_gone(receive: Receive) -> None:
    """Wait until the client of a request has left. The request has no body, or its body has arrived."""
    while (await receive())["type"] != "http.disconnect":
        pass


def upload(request: Request) -> Upload:
    """The body of a request that may have one."""
    body: Upload = request.state.upload
    return body

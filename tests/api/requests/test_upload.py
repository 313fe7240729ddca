"""The body of a request, read by the event loop or by a thread while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import pytest
from fastapi import HTTPException
from starlette.requests import ClientDisconnect

upload: Any = resolve_name("kb.api.requests.upload")
PIECE: int = upload.PIECE


class Client:
    """Sends these messages; `sent` counts those that the server has taken."""

    def __init__(self, *bodies: bytes, leaves: bool = False) -> None:
        last = {"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b"", "more_body": False}
        self.messages: list[dict[str, Any]] = [
            *({"type": "http.request", "body": body, "more_body": True} for body in bodies),
            last,
        ]
        self.sent = 0

    async def receive(self) -> dict[str, Any]:
        self.sent += 1
        return self.messages[self.sent - 1]

    def upload(self, path: str = "/v1/diagnose") -> Any:
        return upload.Upload(self.receive, path, {})


def test_a_thread_gets_the_whole_body_and_small_messages_together() -> None:
    client = Client(b"a" * 10, b"b" * PIECE, b"c" * PIECE, b"d")

    async def read() -> list[bytes]:
        body = client.upload()
        await body.start()
        return await asyncio.to_thread(list, body.pieces())

    pieces = asyncio.run(read())
    assert b"".join(pieces) == b"a" * 10 + b"b" * PIECE + b"c" * PIECE + b"d"
    assert [len(piece) for piece in pieces] == [PIECE + 10, PIECE, 1]


def test_no_more_than_one_piece_is_read_ahead_and_the_rest_can_be_dropped() -> None:
    client = Client(*[b"x" * PIECE] * 20)

    async def read() -> int:
        body = client.upload()
        await body.start()
        pieces: Iterator[bytes] = body.pieces()
        await asyncio.to_thread(next, pieces)
        await asyncio.sleep(0.05)
        taken = client.sent
        await body.drop()
        return taken

    assert asyncio.run(read()) == 2
    assert client.sent == 21


@pytest.mark.parametrize(
    ("client", "path", "error"),
    [
        (Client(b"x" * PIECE, leaves=True), "/v1/diagnose", ClientDisconnect),
        (Client(*[b"x" * PIECE] * 20), "/v1/search", HTTPException),
    ],
    ids=["the client leaves", "the body is too large"],
)
def test_a_thread_gets_the_error_of_the_body(client: Client, path: str, error: type[Exception]) -> None:
    async def read() -> None:
        body = client.upload(path)
        await body.start()
        await asyncio.to_thread(list, body.pieces())

    with pytest.raises(error):
        asyncio.run(read())

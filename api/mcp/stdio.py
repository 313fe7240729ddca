"""The transport over stdio. It answers every invalid line with an error, where the SDK would let the client wait.

The SDK ignores invalid JSON and treats a request whose id is 1.5 as a notification.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TextIO, cast

import anyio
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage

from .messages import refusal


@asynccontextmanager
async def stdio() -> AsyncIterator[tuple[Any, Any]]:
    """The message streams that the SDK reads from and writes to."""
    outgoing: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def messages() -> AsyncIterator[str]:
        async for line in anyio.wrap_file(_take_input()):
            if error := refusal(line):
                await (await outgoing).send(SessionMessage(error))
            elif line.strip():
                yield line

    async with stdio_server(stdin=cast("Any", messages())) as (incoming, stream):
        outgoing.set_result(stream)
        yield incoming, stream


def _take_input() -> TextIO:
    """Reserve standard input for the protocol, so that child processes cannot read from it."""
    assert sys.__stdin__ is not None
    number = sys.__stdin__.fileno()
    private, nothing = os.dup(number), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, number)
    os.close(nothing)
    # Not closed: at the end a thread may still be waiting for a line.
    return open(private, encoding="utf-8", errors="replace", closefd=False)

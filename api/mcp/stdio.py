"""The transport over stdio. Every line that is no message gets an error: the SDK drops it, and a client would wait.

It leaves out invalid JSON, and takes a request whose id is 1.5 for a notification.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TextIO, cast

import anyio
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError
from pydantic_core import from_json


@asynccontextmanager
async def stdio() -> AsyncIterator[tuple[Any, Any]]:
    """The streams of messages that the SDK reads and writes."""
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


def refusal(line: str) -> JSONRPCError | None:
    """The answer to a line that is no message; None for a message and for an empty line."""
    if not line.strip():
        return None
    try:
        message = from_json(line)
    except ValueError as error:
        return _error(PARSE_ERROR, f"this line is no JSON that can be read: {error}", _id_of(line))
    if not isinstance(message, dict):
        return _error(INVALID_REQUEST, "a message is a JSON object, one a line", None)
    if "method" in message and "id" in message and _valid_id(message["id"]) is None:
        return _error(INVALID_REQUEST, "the id of a request is a string or an integer", None)
    try:
        jsonrpc_message_adapter.validate_python(message, by_name=False)
    except ValidationError:
        text = 'this is no JSON-RPC 2.0 message; a request has "jsonrpc": "2.0", an id, a method and params'
        return _error(INVALID_REQUEST, text, _valid_id(message.get("id")))
    return None


def _error(code: int, text: str, request_id: str | int | None) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=code, message=text))


def _id_of(line: str) -> str | int | None:
    """The id in a line that only a more lenient parser reads, for instance one with half of a surrogate pair."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return _valid_id(message.get("id")) if isinstance(message, dict) else None


def _valid_id(value: Any) -> str | int | None:
    if isinstance(value, str):
        is_unicode = value.encode(errors="ignore").decode() == value  # an answer cannot repeat half of a surrogate pair
        return value if is_unicode else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _take_input() -> TextIO:
    """Standard input, for the protocol alone: what is started meanwhile reads nothing."""
    assert sys.__stdin__ is not None
    number = sys.__stdin__.fileno()
    private, nothing = os.dup(number), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, number)
    os.close(nothing)
    # Not closed: at the end a thread may still wait for a line.
    return open(private, encoding="utf-8", errors="replace", closefd=False)

"""The errors for texts that are not valid JSON-RPC messages."""

from __future__ import annotations

import json
from typing import Any

from mcp_types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError
from pydantic_core import from_json


def refusal(text: str) -> JSONRPCError | None:
    """The error for a text that is not a message; None for a message and for an empty text."""
    if not text.strip():
        return None
    try:
        message = from_json(text)
    except ValueError as error:
        return _error(PARSE_ERROR, f"this is not valid JSON: {error}", _id_of(text))
    if not isinstance(message, dict):
        return _error(INVALID_REQUEST, "a message is one JSON object", None)
    if "method" in message and "id" in message and _valid_id(message["id"]) is None:
        return _error(INVALID_REQUEST, "the id of a request is a string or an integer", None)
    try:
        jsonrpc_message_adapter.validate_python(message, by_name=False)
    except ValidationError:
        expected = 'this is not a JSON-RPC 2.0 message; a request has "jsonrpc": "2.0", an id, a method and params'
        return _error(INVALID_REQUEST, expected, _valid_id(message.get("id")))
    return None


def _error(code: int, message: str, request_id: str | int | None) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=code, message=message))


def _id_of(text: str) -> str | int | None:
    """The id in a text that only a lenient parser can read, for instance a text with half of a surrogate pair."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _valid_id(message.get("id")) if isinstance(message, dict) else None


def _valid_id(value: Any) -> str | int | None:
    if isinstance(value, str):
        is_unicode = value.encode(errors="ignore").decode() == value  # an answer cannot repeat half of a surrogate pair
        return value if is_unicode else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None

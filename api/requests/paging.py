"""Cursors, which a client sends back unchanged to read the next page of a list.

A cursor contains a position in one list, so any replica can continue from it and the server stores nothing. Its
checksum is not a secret. An invalid cursor is refused; a forged one would only name another position in the list.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Query

from kb.errors import UsageError

CHECKSUM_BYTES = 6
LONGEST = 600  # an id and the name of a GPU, at four bytes per character
INVALID = "this cursor does not belong to this list", "leave it out to start, or send `next` back unchanged"

Item = TypeVar("Item")

Cursor = Annotated[
    str | None,
    Query(max_length=LONGEST, description="`next` of the previous page; without it, the first page."),
]


def cursor(listing: str, position: str) -> str:
    """The cursor after an item. `listing` names the list; other lists refuse the cursor."""
    text = position.encode()
    return urlsafe_b64encode(_checksum(listing, text) + text).decode().rstrip("=")


def position(listing: str, cursor_text: str | None) -> str | None:
    """The position in a cursor, or None without a cursor. Raises `UsageError` for an invalid cursor."""
    if cursor_text is None:
        return None
    try:
        text = urlsafe_b64decode(cursor_text + "=" * (-len(cursor_text) % 4))[CHECKSUM_BYTES:].decode()
        if cursor(listing, text) == cursor_text:
            return text
    except ValueError:  # not base64, UTF-8 or ASCII
        pass
    raise UsageError(*INVALID)


def number(listing: str, cursor_text: str | None) -> int | None:
    """The position in a list that is ordered by number. Raises like `position`."""
    text = position(listing, cursor_text)
    if text is None:
        return None
    if not text.isdecimal():  # a cursor can be forged
        raise UsageError(*INVALID)
    return int(text)


def page(
    listing: str, items: Sequence[Item], limit: int, key: Callable[[Item], object]
) -> tuple[list[Item], str | None]:
    """At most `limit` items, and the cursor to the rest. If there are more, pass `limit` + 1 items."""
    first = list(items[:limit])
    return first, cursor(listing, str(key(first[-1]))) if len(items) > limit else None


def _checksum(listing: str, text: bytes) -> bytes:
    return hashlib.sha256(f"{listing}\n".encode() + text).digest()[:CHECKSUM_BYTES]

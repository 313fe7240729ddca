"""Where a list goes on: cursors that a client gives back as it got them.

A cursor holds a position in one list, so that any replica can go on from it and nothing has to be remembered. It
carries a checksum, not a secret: a made-up one is refused, and a forged one would name but another place in the list.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Query

from kb.errors import UsageError

CHECKED = 6  # bytes of the checksum
LONGEST = 600  # an id and the name of a GPU, in four bytes a character
NONE_OF_THIS_LIST = "the cursor is none of this list", "leave it out to begin, or give `next` back as it was"

Item = TypeVar("Item")

Cursor = Annotated[
    str | None,
    Query(max_length=LONGEST, description="`next` of the page before; without it the list begins."),
]


def cursor(listing: str, position: str) -> str:
    """The cursor behind an item; `listing` names the list, so that one of another list is refused."""
    held = position.encode()
    return urlsafe_b64encode(_checksum(listing, held) + held).decode().rstrip("=")


def position(listing: str, given: str | None) -> str | None:
    """What a cursor holds; None without one. Raises `UsageError` for one that was never given out."""
    if given is None:
        return None
    try:
        held = urlsafe_b64decode(given + "=" * (-len(given) % 4))[CHECKED:].decode()
        if cursor(listing, held) == given:
            return held
    except ValueError:  # no base64, no UTF-8, no ASCII
        pass
    raise UsageError(*NONE_OF_THIS_LIST)


def number(listing: str, given: str | None) -> int | None:
    """What a cursor holds in a list whose positions are numbers. Raises `UsageError` like `position`."""
    held = position(listing, given)
    if held is None:
        return None
    if not held.isdecimal():  # its checksum is no secret
        raise UsageError(*NONE_OF_THIS_LIST)
    return int(held)


def page(
    listing: str, found: Sequence[Item], limit: int, key: Callable[[Item], object]
) -> tuple[list[Item], str | None]:
    """At most `limit` of what was found, and the cursor to the rest: ask for one more than that to know of it."""
    shown = list(found[:limit])
    return shown, cursor(listing, str(key(shown[-1]))) if len(found) > limit else None


def _checksum(listing: str, held: bytes) -> bytes:
    return hashlib.sha256(f"{listing}\n".encode() + held).digest()[:CHECKED]

"""The requester of the current task's work, kept in a context variable so that queues know it without a parameter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass


async def never() -> None:
    """Wait forever: a requester that never leaves."""
    await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class Requester:
    """The sender of a request, by name. `leave` returns when the client has left."""

    name: str = ""
    leave: Callable[[], Awaitable[None]] = never


NOBODY = Requester()
requester: ContextVar[Requester] = ContextVar("requester", default=NOBODY)

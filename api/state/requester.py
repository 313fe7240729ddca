"""Who waits for the work that this task has to do: known to the queue of that work without being passed along."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass


async def never() -> None:
    """Nobody leaves."""
    await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class Requester:
    """The sender of a request, by name. `leave` ends when the client has left."""

    name: str = ""
    leave: Callable[[], Awaitable[None]] = never


NOBODY = Requester()
requester: ContextVar[Requester] = ContextVar("requester", default=NOBODY)

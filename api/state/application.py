"""The state that all requests of one application share, and typed access to it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from kb.store.database import Database

from ..settings import Settings

if TYPE_CHECKING:  # these modules import the functions below
    from ..requests.access import AccessControl
    from ..routes.mcp import McpService
    from .content import Content, Listing
    from .gap_queue import GapQueue
    from .metrics import Metrics
    from .response_cache import ResponseCache
    from .snapshot import Snapshot

ErrorPage = Callable[[Request, int, str, str, str], Response]  # request, status, title, detail, hint


@dataclass(slots=True)
class ApplicationState:
    """`app.state` of one application. `Rollout` replaces `loading` and `listing`; nothing else changes.

    `loading` is the future of the served content: the first content, or later the newest that could be read. `listing`
    contains its entries, which the front page shows before the index is built.
    """

    settings: Settings
    database: Database
    snapshot: Snapshot
    access: AccessControl
    metrics: Metrics
    cache: ResponseCache
    gaps: GapQueue
    mcp: McpService
    error_page: ErrorPage
    loading: Future[Content] = field(default_factory=Future)
    listing: Listing | None = None


def install(app: FastAPI, state: ApplicationState) -> None:
    app.state = state  # type: ignore[assignment]  # Starlette's own accepts any attribute, even a misspelled one


def state_of(app: FastAPI) -> ApplicationState:
    state: ApplicationState = app.state  # type: ignore[assignment]
    return state


def application(request: Request) -> ApplicationState:
    """The state of the application that answers a request."""
    return state_of(request.app)

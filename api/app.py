"""The application: `create_app` puts the parts together."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from kb import __version__
from kb.store.database import Database

from .pages import routes as pages
from .pages.error_page import error_page
from .requests import problems
from .requests.access import AccessControl
from .requests.middleware import RequestMiddleware
from .routes import admin, context, diagnose, entries, feedback, gaps, health, mcp, metrics, reports, search
from .schemas import openapi
from .settings import Settings
from .state import application
from .state.application import ApplicationState, state_of
from .state.gap_queue import GapQueue
from .state.metrics import Metrics
from .state.response_cache import ResponseCache
from .state.rollout import Rollout
from .state.snapshot import Snapshot

PARTS = (search, diagnose, context, entries, reports, feedback, gaps, admin, health, metrics, mcp, pages)
SWITCH_S = 0.0005  # a thread that scans a log yields to the event loop after this; with Python's 5 ms, searches wait


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service. Without settings, the environment configures it.

    It answers /healthz at once, and questions once the index is open. Later changes in the roots, even a rebuilt index,
    are served only after a restart or a reindex. /docs is our own page, because FastAPI's loads scripts from elsewhere.
    Raises `UsageError` for an invalid root.
    """
    settings = settings or Settings.from_environment()
    app = FastAPI(
        title="kb",
        version=__version__,
        summary="Distributed-training incidents: search, entries, and the verdicts of verifications here.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    database = Database.open(settings.database)
    snapshot = Snapshot(database)
    state = ApplicationState(
        settings=settings,
        database=database,
        snapshot=snapshot,
        access=AccessControl(settings, snapshot),
        metrics=Metrics(),
        cache=ResponseCache(),
        gaps=GapQueue(database),
        mcp=mcp.McpService(app),
        error_page=error_page,
    )
    application.install(app, state)
    problems.install(app)
    app.add_middleware(RequestMiddleware, access=state.access, metrics=state.metrics)
    for part in PARTS:
        app.include_router(part.router)
    openapi.install(app, [part.router for part in PARTS])
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    sys.setswitchinterval(SWITCH_S)
    state = state_of(app)
    rollout = Rollout(state, state.settings.roots)

    def on_refresh() -> None:
        rollout.follow()
        state.metrics.set_database(state.snapshot)

    try:
        with state.database, state.snapshot.refreshing(on_refresh), state.gaps.writing():
            if not state.settings.listens_early:
                await asyncio.wait([asyncio.wrap_future(state.loading)])
            try:
                yield
            finally:
                await state.mcp.close()
    finally:
        rollout.close()  # after the last refresh, which would start to read again

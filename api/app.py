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
from .requests.access import Gate
from .requests.middleware import Front
from .routes import admin, context, diagnose, entries, feedback, gaps, health, mcp, metrics, reports, search
from .routes.metrics import Metrics
from .schemas import openapi
from .settings import Settings
from .state.response_cache import Answers
from .state.rollout import Rollout
from .state.snapshot import Snapshot
from .state.unanswered import Unanswered

PARTS = (search, diagnose, context, entries, reports, feedback, gaps, admin, health, metrics, mcp, pages)
TURN_S = 0.0005  # of a thread that reads a log, before the event loop goes on; at Python's 5 ms, searches wait


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service, by default as the environment sets it up.

    It answers /healthz at once and questions when the index is open. What changes in the roots afterwards, even a
    rebuilt index, shows after a restart or a reindex. /docs is left out, since its page loads scripts from other hosts;
    /openapi.json is there. Raises `UsageError` for a root that is none.
    """
    chosen = settings or Settings.from_environment()
    app = FastAPI(
        title="kb",
        version=__version__,
        summary="Distributed-training incidents: search, entries, and what verifications of them proved here.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    app.state.settings = chosen
    app.state.database = Database.open(chosen.database)
    app.state.snapshot = Snapshot(app.state.database)
    app.state.metrics = Metrics()
    app.state.answers = Answers()
    app.state.unanswered = Unanswered(app.state.database)
    app.state.gate = Gate(chosen, app.state.snapshot)
    app.state.error_page = error_page
    problems.install(app)
    app.add_middleware(Front, gate=app.state.gate, metrics=app.state.metrics)
    for part in PARTS:
        app.include_router(part.router)
    openapi.install(app, [part.router for part in PARTS])
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    sys.setswitchinterval(TURN_S)
    snapshot, counts = app.state.snapshot, app.state.metrics
    rollout = Rollout(app.state, app.state.settings.roots, snapshot, counts.serve)

    def seen() -> None:
        rollout.follow()
        counts.see(snapshot)

    try:
        with app.state.database, snapshot.kept_fresh(seen), app.state.unanswered.counted():
            if not app.state.settings.listens_early:
                await asyncio.wait([asyncio.wrap_future(app.state.loading)])
            async with mcp.running(app):
                yield
    finally:
        rollout.close()  # when nobody looks at the database any more, who would begin to read again

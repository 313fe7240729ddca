"""The application: `create_app` puts the parts together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI

from kb import __version__
from kb.errors import KbError
from kb.store.database import Database

from . import admin, context, diagnose, entries, feedback, gaps, health, metrics, problems, reports, search
from .content import Content
from .pages import routes as pages
from .settings import Settings

PARTS = (search, diagnose, context, entries, reports, feedback, gaps, admin, health, metrics, pages)


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service, by default as the environment sets it up.

    The index is opened once, while the server already answers /healthz, and stays as it was: what changes in the
    roots afterwards, even a rebuilt index, shows after a restart or a reindex. /docs is left out, since its page loads
    scripts from other hosts; /openapi.json is there. Raises `UsageError` for a root that is none.
    """
    chosen = settings or Settings.from_environment()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        searching = ThreadPoolExecutor(1, "kb-search")
        app.state.loading = loading = searching.submit(Content.load, chosen.roots, searching)
        loading.add_done_callback(_log_failure)
        try:
            yield
        finally:
            searching.shutdown(cancel_futures=True)
            if not loading.cancelled() and not loading.exception():
                loading.result().close()

    app = FastAPI(
        title="kb",
        version=__version__,
        summary="Distributed-training incidents: search, entries, and what verifications of them proved here.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.settings = chosen
    app.state.database = Database.open(chosen.database)  # type: ignore[arg-type]  # a URL, once it takes one
    problems.install(app)
    for part in PARTS:
        app.include_router(part.router)
    return app


def _log_failure(loading: Future[Content]) -> None:
    error = None if loading.cancelled() else loading.exception()
    if error:
        traceback = None if isinstance(error, KbError) else error
        problems.log.error("the content cannot be served: %s", error, exc_info=traceback)

"""The application: `create_app` puts the parts together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from kb import __version__, root
from kb.errors import KbError
from kb.root import Root
from kb.store import Store

from . import diagnose, entries, health, problems, search
from .content import Content


def create_app(roots: Sequence[Root] | None = None, store_path: Path | None = None) -> FastAPI:
    """An API over some content roots (default: the configured ones) and a store of reports (default: the user's).

    The index is opened once, while the server already answers /healthz, and stays as it was: what changes in the
    roots afterwards, even a rebuilt index, shows after a restart. /docs is left out, since its page loads scripts
    from other hosts; /openapi.json is there. Raises `UsageError` for a root that is none.
    """
    chosen = root.configured() if roots is None else tuple(roots)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        searching = ThreadPoolExecutor(1, "kb-search")
        app.state.loading = loading = searching.submit(Content.load, chosen, searching)
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
    app.state.store = Store.open(store_path)
    problems.install(app)
    for part in (search, diagnose, entries, health):
        app.include_router(part.router)
    return app


def _log_failure(loading: Future[Content]) -> None:
    error = None if loading.cancelled() else loading.exception()
    if error:
        traceback = None if isinstance(error, KbError) else error
        problems.log.error("the content cannot be served: %s", error, exc_info=traceback)

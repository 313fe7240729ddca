"""Replaces the served content when the database names a new generation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kb.content.roots import Root
from kb.errors import KbError

from ..log import log
from .application import ApplicationState
from .content import Content, Listing
from .scanning import ScanPool

LONGEST_WAIT_S = 10.0  # for a database that may be unavailable


class Rollout:
    """Reads content in a thread, at the start and for every new generation, and puts it into `state`.

    A request keeps the content that it began with. Replaced content is closed once nothing refers to it.
    """

    def __init__(self, state: ApplicationState, roots: Sequence[Root]) -> None:
        self._state = state
        self._roots = roots
        self._generation: int | None = None
        state.listing = None
        state.loading = self._begin()
        self._reading.add_done_callback(self._put_in_place)

    def follow(self) -> None:
        """Start to read if the database names a generation other than the one that was read last."""
        if self._reading.done() and self._state.snapshot.generation not in (None, self._generation):
            self._begin().add_done_callback(self._put_in_place)

    def close(self) -> None:
        """Wait for content that is being read, and close the served content. No question may be in progress."""
        self._searching.shutdown(cancel_futures=True)
        served = _content_of(self._state.loading)
        if served:
            served.close()
            served.searching.shutdown()

    def _begin(self) -> Future[Content]:
        self._searching = ThreadPoolExecutor(1, "kb-search")
        self._reading = self._searching.submit(self._read, self._searching)
        return self._reading

    def _read(self, searching: ThreadPoolExecutor) -> Content:
        """Read content. The generation is noted before the files are read, so that no change in between is missed."""
        self._state.snapshot.tried.wait(LONGEST_WAIT_S)
        self._generation = self._state.snapshot.generation
        listing = Listing.load(self._roots)
        if self._state.listing is None:
            self._state.listing = listing
        return Content.load(self._roots, searching, listing)

    def _put_in_place(self, reading: Future[Content]) -> None:
        content, old = _content_of(reading), self._state.loading
        if content is None:
            _log_failure(reading)
            return
        content.scanning.start()
        self._state.metrics.set_content(self._generation or 0, len(content.catalog))
        self._state.loading, self._state.listing = reading, content.listing
        replaced = None if old is reading else _content_of(old)
        if replaced:
            closing = weakref.finalize(replaced, _close, replaced.index, replaced.searching, replaced.scanning)
            closing.atexit = False


def _content_of(reading: Future[Content]) -> Content | None:
    is_read = reading.done() and not reading.cancelled() and not reading.exception()
    return reading.result() if is_read else None


def _close(index: Any, searching: ThreadPoolExecutor, scanning: ScanPool) -> None:
    """Close content in the search thread, after the last question, which may still be running unattended."""
    searching.submit(index.close)
    searching.shutdown(wait=False)
    scanning.close()


def _log_failure(reading: Future[Content]) -> None:
    error = None if reading.cancelled() else reading.exception()
    if error:
        traceback = None if isinstance(error, KbError) else error
        log.error("the content cannot be served: %s", error, exc_info=traceback)

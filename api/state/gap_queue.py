"""Gaps on their way to the database, so that requests neither wait for the database nor fail with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from queue import Empty, Full, Queue

from fastapi import Request

from kb.diagnose.diagnosis import Diagnosis
from kb.errors import StoreUnavailable
from kb.redaction.redactor import redact
from kb.search.query import VOLATILE
from kb.search.results import Answer
from kb.sharing.shared_report import INVISIBLE
from kb.store import gaps
from kb.store.database import Database

from ..log import log
from ..requests.headers import is_same_site
from .application import application
from .background import repeated
from .response_cache import CachedResponse

MOST_WAITING = 1000  # questions; beyond that, they are dropped while the database is unavailable
MOST_AT_ONCE = 200
EVERY_S = 1.0
LONGEST_READ, LONGEST_STORED = 2000, 300  # characters of a question; redacting them takes milliseconds
MOST_LINES = 3  # per log

Question = tuple[str, str, str]  # kind, text, the nearest entry or ""


class GapQueue:
    """Adds redacted gaps to the database in batches, from a separate thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: Queue[Question] = Queue(MOST_WAITING)
        self._batch: list[Question] = []  # redacted; kept while the database is unavailable
        self.dropped = 0

    def add(self, kind: str, text: str, best: str = "") -> None:
        """Add a gap without blocking. If the queue is full, the gap is dropped and counted in `dropped`."""
        try:
            self._waiting.put_nowait((kind, text[:LONGEST_READ], best))
        except Full:
            self.dropped += 1

    def add_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Add the first failure lines of a log as a gap, if no entry explains it."""
        if diagnosis.unexplained and diagnosis.failures:
            failures = islice(diagnosis.failures, MOST_LINES)
            lines = (re.sub(VOLATILE, " ", failure.line.text) for failure in failures)
            self.add("diagnose", " | ".join(lines), diagnosis.findings[0].id if diagnosis.findings else "")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write the gaps that are added within the block, once a second and at the end."""
        try:
            with repeated(self.write, EVERY_S, "kb-gaps"):
                yield
        finally:
            while self.write():
                pass

    def write(self) -> bool:
        """Write a batch, or keep it for the next time. Returns whether one was written. Never raises."""
        try:
            self._collect()
            gaps.add(self._database, self._batch)
        except StoreUnavailable:  # logged by the snapshot
            return False
        except Exception:  # a batch that cannot be written must not stop the next
            log.exception("%d gaps could not be written", len(self._batch))
        has_written, self._batch = bool(self._batch), []
        return has_written

    def _collect(self) -> None:
        with suppress(Empty):
            while len(self._batch) < MOST_AT_ONCE:
                kind, text, best = self._waiting.get_nowait()
                self._batch.append((kind, _clean(text), best))


def _clean(text: str) -> str:
    """The text as one line, redacted and cut."""
    return " ".join(INVISIBLE.sub(" ", redact(text)).split())[:LONGEST_STORED].rstrip()


def count(request: Request, text: str, answer: Answer | CachedResponse) -> None:
    """Count a search. One without a good answer is added as a gap, unless a page of another site asked it.

    `text` is "" if a filter may be the reason.
    """
    state = application(request)
    state.metrics.count_search(answered=answer.answered)
    if text and not answer.answered and is_same_site(dict(request.scope.get("headers", ())), default=True):
        state.gaps.add("search", text, answer.best)

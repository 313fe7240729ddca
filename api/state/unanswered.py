"""Questions without a good answer on their way to the database: no reader waits for it, nor fails with it."""

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
from kb.store import gaps
from kb.store.database import Database

from ..requests.problems import log
from .background import repeated
from .response_cache import Sent

MOST_WAITING = 1000  # questions; with a database that is away what comes then is dropped
MOST_AT_ONCE = 200
EVERY_S = 1.0
LONGEST_READ, LONGEST_KEPT = 2000, 300  # characters of a question; redacting takes milliseconds
MOST_SEEN = 3  # lines of a log

Question = tuple[str, str, str]  # kind, text, the entry that came nearest or ""


class Unanswered:
    """Counts questions in the database, redacted, a batch at a time in a thread of its own."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: Queue[Question] = Queue(MOST_WAITING)
        self._batch: list[Question] = []  # redacted, and kept while the database is away
        self.dropped = 0

    def note(self, kind: str, text: str, best: str = "") -> None:
        """Count a question soon. Never waits: when too many are waiting it is dropped, and that is counted."""
        try:
            self._waiting.put_nowait((kind, text[:LONGEST_READ], best))
        except Full:
            self.dropped += 1

    def note_diagnosis(self, found: Diagnosis) -> None:
        """Count a log that no entry explains, by its first lines that report a failure."""
        if found.unexplained and found.seen:
            lines = (re.sub(VOLATILE, " ", one.line.text) for one in islice(found.seen, MOST_SEEN))
            self.note("diagnose", " | ".join(lines), found.findings[0].id if found.findings else "")

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Write what is noted within, once a second and at the end."""
        try:
            with repeated(self.write, EVERY_S, "kb-unanswered"):
                yield
        finally:
            while self.write():
                pass

    def write(self) -> bool:
        """Write a batch of what waits, or keep it for the next time; whether one was written. Raises nothing."""
        try:
            self._collect()
            gaps.add(self._database, self._batch)
        except StoreUnavailable:  # the snapshot says so in the log
            return False
        except Exception:  # one that cannot be written must not stop the others
            log.exception("%d questions without an answer could not be counted", len(self._batch))
        written, self._batch = bool(self._batch), []
        return written

    def _collect(self) -> None:
        with suppress(Empty):
            while len(self._batch) < MOST_AT_ONCE:
                kind, text, best = self._waiting.get_nowait()
                self._batch.append((kind, _tidy(text), best))


def _tidy(text: str) -> str:
    """In one line, without names and secrets, cut."""
    return " ".join(redact(text).split())[:LONGEST_KEPT].rstrip()


def count(request: Request, text: str, found: Answer | Sent) -> None:
    """Count an answer; when it is no good one the question is a gap. `text` is "" where a filter may be the reason."""
    state = request.app.state
    state.metrics.searches.labels("good" if found.answered else "none").inc()
    if text and not found.answered:
        state.unanswered.note("search", text, found.best)

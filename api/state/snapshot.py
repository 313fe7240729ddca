"""A copy of the state of the database, so that the service keeps answering while the database is unavailable."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Lock

from kb.errors import StoreUnavailable
from kb.store import content_generation, keys, reports
from kb.store.database import Database
from kb.store.keys import StoredKey
from kb.store.reports import VerdictCount

from ..log import log
from .background import repeated

REFRESH_S = 2.0  # by then, every replica refuses a revoked key and reads new content
USES_S = 30.0  # interval for writing the last uses of keys
RETRY_S = 0.5  # interval of reads for unknown keys
LONGEST_WAIT_S = 3.0  # how long a request with an unknown key waits for the database
KEYS_VALID_S = 15 * 60.0  # how long keys are accepted while the database is unavailable: they may have been revoked


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """The state of the database. `read_at` is on the monotonic clock, or None if the database was never read."""

    read_at: float | None = None
    keys: Mapping[str, StoredKey] = field(default_factory=dict)
    generation: int | None = None
    reports: int = 0
    verdict_counts: Sequence[VerdictCount] = ()


class Snapshot:
    """The last state that could be read. A separate thread reads it every 2 s."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._state = DatabaseState()
        self._reading = Lock()
        self._read_at = -RETRY_S
        self._refreshing: asyncio.Future[None] | None = None
        self._uses: dict[str, datetime.datetime] = {}
        self._written_at = clock()
        self.is_up: bool | None = None  # None before the first read
        self.tried = Event()

    @property
    def generation(self) -> int | None:
        """The generation of the content to serve; None until the database is read."""
        return self._state.generation

    @property
    def reports(self) -> int:
        """The number of shared reports."""
        return self._state.reports

    @property
    def verdict_counts(self) -> Sequence[VerdictCount]:
        """What reports say about entries, by hardware; empty until the database is read."""
        return self._state.verdict_counts

    @property
    def knows_keys(self) -> bool:
        """Whether keys can be checked, which means that they were read recently enough."""
        read_at = self._state.read_at
        return read_at is not None and self._clock() - read_at <= KEYS_VALID_S

    def key(self, key_id: str) -> StoredKey | None:
        """A key as last read. Raises `StoreUnavailable` unless `knows_keys`."""
        if not self.knows_keys:
            raise StoreUnavailable("keys cannot be checked while the database is unavailable")
        return self._state.keys.get(key_id)

    def use(self, key_id: str) -> None:
        """Record that a key was used now."""
        self._uses[key_id] = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)

    async def refresh_soon(self) -> None:
        """Read the database, for a key newer than the snapshot. Callers share reads, at most one per 0.5 s.

        Raises `StoreUnavailable` if the database takes too long.
        """
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(self._refresh_once())
        done, _ = await asyncio.wait([self._refreshing], timeout=LONGEST_WAIT_S)
        if not done:
            raise StoreUnavailable("keys cannot be checked while the database does not answer")

    async def _refresh_once(self) -> None:
        await asyncio.sleep(self._read_at + RETRY_S - self._clock())
        self._refreshing = None  # a later caller may have a key that is newer than this read
        await asyncio.to_thread(self.refresh)

    @contextmanager
    def refreshing(self, on_refresh: Callable[[], None]) -> Iterator[None]:
        """Read the database now and every 2 s, in a thread that calls `on_refresh` each time."""

        def refresh() -> None:
            self.refresh()
            on_refresh()

        try:
            with repeated(refresh, REFRESH_S, "kb-snapshot"):
                yield
        finally:
            with suppress(StoreUnavailable):
                if self.is_up:
                    self._write_uses()

    def refresh(self) -> None:
        """Read the database, or keep the last state. Never raises."""
        with self._reading:
            self._read_at = self._clock()
            try:
                self._state = self._read()
                self._write_uses_if_due()
            except StoreUnavailable as error:
                self._set_up(False, f"{error.message}; {self._consequence()}")
            else:
                self._set_up(True, "the database answers")
            self.tried.set()

    def _consequence(self) -> str:
        if self._state.read_at is None:
            return "it was never read: until it answers, no key can be checked"
        return "the last state that was read is served"

    def _read(self) -> DatabaseState:
        stored = {item.key.id: item for item in keys.list_all(self._database)}
        if self._state.keys and not stored:  # kb revokes keys but never deletes them
            raise StoreUnavailable(f"the store {self._database.name} has lost its keys: it was deleted or emptied")
        count, verdict_counts = reports.count(self._database), self._state.verdict_counts
        if count != self._state.reports:
            verdict_counts = tuple(reports.verdict_counts(self._database))
        generation = content_generation.generation(self._database)
        return DatabaseState(self._read_at, stored, generation, count, verdict_counts)

    def _set_up(self, is_up: bool, message: str) -> None:
        """Set the state of the connection, and log a change once."""
        was_up, self.is_up = self.is_up, is_up  # before logging: a reader of the log may query it at once
        if was_up is not is_up and not (is_up and was_up is None):
            (log.info if is_up else log.error)("%s", message)

    def _write_uses_if_due(self) -> None:
        if self._clock() - self._written_at >= USES_S:
            self._write_uses()

    def _write_uses(self) -> None:
        uses, self._uses = self._uses, {}
        try:
            if uses:
                keys.record_uses(self._database, uses)
        except StoreUnavailable:
            self._uses = uses | self._uses
            raise
        self._written_at = self._clock()

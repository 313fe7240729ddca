"""What a process knows of the database, so that reading goes on while the database is away."""

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
from kb.store.reports import Standing

from ..requests.problems import log
from .background import repeated

REFRESH_S = 2.0  # after at most this a revoked key is refused and new content is noticed, in every replica
USES_S = 30.0  # between two writes of when keys were last used
LOOK_S = 0.5  # between two looks for keys that are not known yet
BELIEVED_S = 15 * 60.0  # how long keys are believed without a database that could have revoked them


@dataclass(frozen=True, slots=True)
class Known:
    """One state of the database. `read_at` is on the monotonic clock; None: the database was never read."""

    read_at: float | None = None
    keys: Mapping[str, StoredKey] = field(default_factory=dict)
    generation: int | None = None
    reports: int = 0
    standings: Sequence[Standing] = ()


class Snapshot:
    """The last known state, read again every 2 s by a thread of its own, and kept while the database is away."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._known = Known()
        self._reading = Lock()
        self._tried_at = -LOOK_S
        self._looking: asyncio.Future[None] | None = None
        self._uses: dict[str, datetime.datetime] = {}
        self._written_at = clock()
        self.is_up: bool | None = None  # None before the first look
        self.looked = Event()

    @property
    def generation(self) -> int | None:
        """Number of the content to serve; None while nobody knows."""
        return self._known.generation

    @property
    def reports(self) -> int:
        """How many shared reports there are."""
        return self._known.reports

    @property
    def standings(self) -> Sequence[Standing]:
        """What reports say of entries, by hardware; empty until the database was read."""
        return self._known.standings

    @property
    def knows_keys(self) -> bool:
        """Whether keys can be checked: they were read, and not so long ago that this says nothing."""
        read_at = self._known.read_at
        return read_at is not None and self._clock() - read_at <= BELIEVED_S

    def key(self, key_id: str) -> StoredKey | None:
        """A key as it was last seen. Raises `StoreUnavailable` where `knows_keys` is false."""
        if not self.knows_keys:
            raise StoreUnavailable("keys cannot be checked while the database is away")
        return self._known.keys.get(key_id)

    def use(self, key_id: str) -> None:
        """Remember that a key is used now."""
        self._uses[key_id] = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)

    async def look_again(self) -> None:
        """Read the database, for a key that is newer than the snapshot. Callers share a look, and looks are few."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        await asyncio.sleep(self._tried_at + LOOK_S - self._clock())
        self._looking = None  # who comes from now on may have a key that this look is too early for
        await asyncio.to_thread(self.refresh)

    @contextmanager
    def kept_fresh(self, seen: Callable[[], None]) -> Iterator[None]:
        """Read the database now and every 2 s, in a thread that calls `seen` each time."""

        def look() -> None:
            self.refresh()
            seen()

        try:
            with repeated(look, REFRESH_S, "kb-snapshot"):
                yield
        finally:
            with suppress(StoreUnavailable):
                self._write_uses()

    def refresh(self) -> None:
        """Read the database, or keep what is known. Raises nothing."""
        with self._reading:
            self._tried_at = self._clock()
            try:
                self._known = self._read()
                self._write_uses_sometimes()
            except StoreUnavailable as error:
                self._note(False, f"{error.message}; {self._left()}")
            else:
                self._note(True, "the database answers")
            self.looked.set()

    def _left(self) -> str:
        """What there is without the database."""
        if self._known.read_at is None:
            return "it was never read: until it answers, no key can be checked"
        return "what was read before is served"

    def _read(self) -> Known:
        found = {one.key.id: one for one in keys.everything(self._database)}
        count, standings = reports.count(self._database), self._known.standings
        if count != self._known.reports:
            standings = tuple(reports.standing(self._database))
        return Known(self._tried_at, found, content_generation.generation(self._database), count, standings)

    def _note(self, is_up: bool, text: str) -> None:
        """Say in the log what has changed, once."""
        was, self.is_up = self.is_up, is_up  # before it is said: who reads the log may ask at once
        if was is not is_up and not (is_up and was is None):
            (log.info if is_up else log.error)("%s", text)

    def _write_uses_sometimes(self) -> None:
        if self._clock() - self._written_at >= USES_S:
            self._write_uses()

    def _write_uses(self) -> None:
        uses, self._uses = self._uses, {}
        try:
            if uses:
                keys.touch(self._database, uses)
        except StoreUnavailable:
            self._uses = uses | self._uses
            raise
        self._written_at = self._clock()

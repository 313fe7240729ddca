"""The store: one SQLite file that `kb verify` writes and `kb history` reads, or what the replicas of a service share.

A write is one transaction, so that a killed process leaves all of it or none, and so is the migration that may come
before it. A database that is not ours, is damaged, or comes from a newer kb is refused and never written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlmodel import Session

from kb.errors import StoreUnavailable, UsageError
from kb.store.backend import Place
from kb.store.postgresql import PostgresqlDatabase
from kb.store.schema import SCHEMA, upgrade
from kb.store.sqlite import SqliteFile, default_path

FORMS = "postgresql://user:password@host/database, sqlite:////absolute/path, or the path of a file"


@dataclass(frozen=True, slots=True)
class Database:
    """Where kb keeps things. Every method but `open` raises `StoreUnavailable` and nothing else.

    Opening touches nothing: the first write makes a file and its tables, and reading where nothing was ever kept
    finds nothing. Safe to share between threads; any number of processes may use one database.
    """

    place: Place

    @classmethod
    def open(cls, where: str | Path | None = None) -> Self:
        """The store in a file or behind a URL, by default the user's own file.

        Raises `UsageError` for a URL of another kind, and for PostgreSQL without its driver.
        """
        return cls(_place(where or default_path()))

    @property
    def name(self) -> str:
        """For messages: the path of the file, or the URL without user and password."""
        return self.place.name

    def close(self) -> None:
        self.place.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction: what is added in it is kept as a whole, or on an error not at all."""
        with self._border("written"):
            self.place.make_room()
            with Session(self.place.engine, expire_on_commit=False) as session:
                self._begin_writing(session)
                yield session
                session.commit()
                self.place.settle()

    @contextmanager
    def reading(self) -> Iterator[Session | None]:
        """A transaction that only reads; None when nothing was ever kept: reading makes nothing."""
        with self._border("read"):
            if not self.place.exists():
                yield None
                return
            with Session(self.place.engine) as session:
                yield session if self._begin_reading(session) else None

    def prepare(self) -> None:
        """Bring the schema up to date. Any number of processes may do so at once."""
        with self.writing():
            pass

    def ping(self) -> None:
        """Raises when it cannot be reached."""
        with self.reading():
            pass

    def _begin_writing(self, session: Session) -> None:
        connection = session.connection()
        if self._known(self.place.begin(connection, is_writing=True)) == SCHEMA:
            return
        found = self._known(self.place.hold(connection))  # by now another process may have done it
        if found < SCHEMA:
            upgrade(connection, found)
            self.place.mark(connection, SCHEMA)

    def _begin_reading(self, session: Session) -> int:
        """The number of the schema, which is today's, or 0 in an empty database."""
        found = self._known(self.place.begin(session.connection(), is_writing=False))
        if not 0 < found < SCHEMA:
            return found
        session.rollback()
        self.prepare()
        return self.place.begin(session.connection(), is_writing=False)

    def _known(self, schema: int) -> int:
        if schema > SCHEMA:
            message = f"{self.name} was written by a newer kb: its schema is {schema}, this one knows {SCHEMA}"
            raise StoreUnavailable(message, "update kb: pip install --upgrade gpu-kb")
        return schema

    @contextmanager
    def _border(self, verb: str) -> Iterator[None]:
        """Foreign errors become `StoreUnavailable`; the SQL and its values stay out of the message."""
        try:
            yield
        except (SQLAlchemyError, OSError, ValueError, TypeError) as error:  # the last two: a value that cannot be ours
            cause = getattr(error, "orig", None) or error
            said = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise StoreUnavailable(f"the store {self.name} cannot be {verb}: {said}", self.place.hint(cause)) from error


def _place(where: str | Path) -> Place:
    if "://" not in str(where):
        return SqliteFile.at(Path(where))
    try:
        url = make_url(str(where).replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):
        raise UsageError("the URL of the database cannot be read", FORMS) from None
    if "@" in f"{url.host}{url.database}":  # of a password; it would be shown as part of the name
        raise UsageError("the URL of the database cannot be read", f"{FORMS}; in a password write %40 for @")
    kind = url.get_backend_name()
    if kind == "postgresql":
        return PostgresqlDatabase.at(url)
    if kind == "sqlite" and url.database and url.database != ":memory:":
        return SqliteFile.at(Path(url.database))
    raise UsageError(f"a database of this kind cannot be used: {kind}", FORMS)

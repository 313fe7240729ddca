"""The store: a SQLite file that `kb verify` writes and `kb history` reads, or the database of a service.

A write is one transaction, including the migration that may precede it, so a killed process leaves all of it or none.
Databases that are damaged or belong to another program or a newer kb are refused and never written to.
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
from kb.store.backend import Backend
from kb.store.postgresql import PostgresqlDatabase
from kb.store.schema import SCHEMA, upgrade
from kb.store.sqlite import SqliteFile, default_path

FORMS = "postgresql://user:password@host/database, sqlite:////absolute/path, or the path of a file"


@dataclass(frozen=True, slots=True)
class Database:
    """The store. All methods except `open` raise only `StoreUnavailable`.

    Opening it has no effect: the first write creates the file and its tables; before that, reading returns nothing.
    Threads may share one instance, and any number of processes may use one database.
    """

    backend: Backend

    @classmethod
    def open(cls, where: str | Path | None = None) -> Self:
        """Open the store in a file or at a URL, by default the user's file.

        Raises `UsageError` for another kind of URL, and for PostgreSQL without its driver.
        """
        return cls(_backend_at(where or default_path()))

    @property
    def name(self) -> str:
        """The name for messages: the path of the file, or the URL without user and password."""
        return self.backend.name

    def close(self) -> None:
        self.backend.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction that is committed as a whole, or rolled back on an error."""
        with self._translated_errors("written"):
            self.backend.prepare_storage()
            with Session(self.backend.engine, expire_on_commit=False) as session:
                self._begin_writing(session)
                yield session
                session.commit()
                self.backend.after_commit()

    @contextmanager
    def reading(self) -> Iterator[Session | None]:
        """A transaction that only reads; None if nothing was ever stored, since reading creates nothing."""
        with self._translated_errors("read"):
            if not self.backend.exists():
                yield None
                return
            with Session(self.backend.engine) as session:
                yield session if self._begin_reading(session) else None

    def prepare(self) -> None:
        """Bring the schema up to date. Any number of processes may do so at once."""
        with self.writing():
            pass

    def _begin_writing(self, session: Session) -> None:
        connection = session.connection()
        if self._checked(self.backend.begin(connection, is_writing=True)) == SCHEMA:
            return
        schema = self._checked(self.backend.lock_schema(connection))  # another process may have migrated by now
        if schema < SCHEMA:
            upgrade(connection, schema)
            self.backend.stamp(connection, SCHEMA)

    def _begin_reading(self, session: Session) -> int:
        """The number of the schema, after migrating if needed: `SCHEMA`, or 0 for an empty database."""
        schema = self._checked(self.backend.begin(session.connection(), is_writing=False))
        if not 0 < schema < SCHEMA:
            return schema
        session.rollback()
        self.prepare()
        return self.backend.begin(session.connection(), is_writing=False)

    def _checked(self, schema: int) -> int:
        if schema > SCHEMA:
            message = f"{self.name} was written by a newer kb: its schema is {schema}, this one knows {SCHEMA}"
            raise StoreUnavailable(message, "install the newer kb here as well")
        return schema

    @contextmanager
    def _translated_errors(self, verb: str) -> Iterator[None]:
        """Translate errors of the driver to `StoreUnavailable`, without the SQL and its values in the message."""
        try:
            yield
        except (
            SQLAlchemyError,
            OSError,
            ValueError,
            TypeError,
        ) as error:  # the last two: a stored value of another form
            cause = getattr(error, "orig", None) or error
            reason = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise StoreUnavailable(
                f"the store {self.name} cannot be {verb}: {reason}", self.backend.hint(cause)
            ) from error


def _backend_at(where: str | Path) -> Backend:
    if "://" not in str(where):
        return SqliteFile.at(Path(where))
    try:
        url = make_url(str(where).replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):
        raise UsageError("the URL of the database cannot be read", FORMS) from None
    if "@" in f"{url.host}{url.database}":  # from a password, which messages would show in the name
        raise UsageError("the URL of the database cannot be read", f"{FORMS}; in a password write %40 for @")
    kind = url.get_backend_name()
    if kind == "postgresql":
        return PostgresqlDatabase.at(url)
    if kind == "sqlite" and url.database and url.database != ":memory:":
        return SqliteFile.at(Path(url.database))
    raise UsageError(f"unsupported kind of database: {kind}", FORMS)

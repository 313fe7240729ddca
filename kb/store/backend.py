"""The interface between `kb.store.database` and a kind of database: a SQLite file or a PostgreSQL database."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy import Connection, Engine


class Backend(Protocol):
    """What differs between the two kinds of database. `name` is for messages and contains no password."""

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> Engine: ...

    def exists(self) -> bool:
        """False if it is known without connecting that nothing was ever stored here."""

    def prepare_storage(self) -> None:
        """Create what a first write needs outside the database."""

    def begin(self, connection: Connection, *, is_writing: bool) -> int:
        """Begin a transaction. Returns the number of the schema, 0 for an empty database.

        Raises `StoreUnavailable` for the database of another program.
        """

    def lock_schema(self, connection: Connection) -> int:
        """Keep others from changing the schema until this transaction ends. Returns the number of the schema."""

    def stamp(self, connection: Connection, schema: int) -> None:
        """Record in the database that it is kb's and has this schema, if the migrations do not do so."""

    def after_commit(self) -> None:
        """Called when the transaction is committed; must not raise."""

    def hint(self, cause: BaseException) -> str:
        """The hint for an error of the driver."""

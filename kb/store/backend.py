"""Where a store lives, as `kb.store.database` sees it: a SQLite file or a PostgreSQL database."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy import Connection, Engine


class Place(Protocol):
    """What the two kinds of database do differently. `name` is for messages: it holds no password."""

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> Engine: ...

    def exists(self) -> bool:
        """False when it is known, without connecting, that nothing was ever kept here."""

    def make_room(self) -> None:
        """Make what a first write needs outside of the database."""

    def begin(self, connection: Connection, *, is_writing: bool) -> int:
        """Begin a transaction; the number of the schema that it finds, 0 in an empty database.

        Raises `StoreUnavailable` for the database of another program.
        """

    def hold(self, connection: Connection) -> int:
        """Keep others from changing the schema until this transaction ends; the number of the schema then."""

    def mark(self, connection: Connection, schema: int) -> None:
        """Say in the database that it is kb's and has this schema, as far as its migrations do not."""

    def settle(self) -> None:
        """After a commit. Raises nothing: what was written is kept."""

    def hint(self, cause: BaseException) -> str:
        """What to do about an error of the driver."""

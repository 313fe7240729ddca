"""A store in a PostgreSQL database, which several hosts share.

The client limits connecting and silence on the network, the server limits each statement. If the server is stopped
while its kernel still answers, kb itself gives up a statement and closes the connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from sqlalchemy import URL, Connection, Engine, column, create_engine, event, select, table

from kb.errors import UsageError
from kb.installation import install_command
from kb.store.schema import TABLE

LOCK = 0x6B625250  # key of the advisory lock with which one process at a time changes the schema
MIGRATION_MS = 600_000  # a migration may have to rewrite a large table
CONNECTION: dict[str, Any] = {  # options in the URL take precedence
    "connect_timeout": 3,  # seconds, for each address of the host
    "tcp_user_timeout": 5000,  # ms without acknowledgement before the host is considered gone
    "keepalives_idle": 5,  # seconds; these three do the same while kb waits for the host
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "options": "-c statement_timeout=5s -c lock_timeout=4s -c idle_in_transaction_session_timeout=30s",
    "application_name": "kb",
}
POOL: dict[str, Any] = {"pool_size": 5, "max_overflow": 5, "pool_timeout": 5.0, "pool_pre_ping": True}
HINTS = {
    "42501": "its user needs the right to make tables: GRANT CREATE, USAGE ON SCHEMA public TO ...",
    "42P07": "give kb a database of its own",
    "53100": "the disk of its server is full",
    "55P03": "another transaction holds what is needed; try again",
    "57014": "it took too long; try again",
}  # by SQLSTATE (postgresql.org/docs/current/errcodes-appendix.html)
UNREACHABLE = "is the server of KB_DATABASE_URL up, and may this user use the database?"


@dataclass(frozen=True, slots=True)
class PostgresqlDatabase:
    """A database on a server, used only by kb. The number of its schema is in Alembic's table."""

    name: str
    engine: Engine = field(repr=False)

    @classmethod
    def at(cls, url: URL) -> Self:
        """The database at a URL. Raises `UsageError` if the driver is not installed."""
        public_url = URL.create("postgresql", host=url.host, port=url.port, database=url.database)
        arguments = {name: value for name, value in CONNECTION.items() if name not in url.query}
        try:
            engine = create_engine(url.set(drivername="postgresql+psycopg"), connect_args=arguments, **POOL)
        except ModuleNotFoundError:
            message = "PostgreSQL needs psycopg, which is not installed here"
            raise UsageError(message, install_command("server")) from None
        event.listen(engine, "do_connect", _connect)
        return cls(public_url.render_as_string(), engine)

    def exists(self) -> bool:
        return True

    def prepare_storage(self) -> None:
        """Do nothing: the administrator has created the database."""

    def begin(self, connection: Connection, *, is_writing: bool) -> int:
        """The driver itself begins the transaction."""
        if not is_writing:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        return _schema(connection)

    def lock_schema(self, connection: Connection) -> int:
        _driver_connection(connection).deadline_s = 2 * MIGRATION_MS / 1000
        connection.exec_driver_sql(f"SET LOCAL lock_timeout={MIGRATION_MS}")
        connection.exec_driver_sql(f"SET LOCAL statement_timeout={MIGRATION_MS}")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK})")
        return _schema(connection)

    def stamp(self, connection: Connection, schema: int) -> None:
        """Do nothing: Alembic records it in its table."""

    def after_commit(self) -> None:
        """Do nothing."""

    def hint(self, cause: BaseException) -> str:
        return HINTS.get(str(getattr(cause, "sqlstate", "")), UNREACHABLE)


def _connect(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Connect. The import is here because the driver need not be installed without PostgreSQL."""
    from kb.store.postgresql_connection import DeadlineConnection

    return DeadlineConnection.connect(*arguments, **options)


def _driver_connection(connection: Connection) -> Any:
    return connection.connection.driver_connection


def _schema(connection: Connection) -> int:
    if connection.exec_driver_sql(f"SELECT to_regclass('{TABLE}')").scalar() is None:
        return 0
    return int(connection.scalar(select(column("version_num")).select_from(table(TABLE))) or 0)

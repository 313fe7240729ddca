"""Which schema a database has, and how it gets today's: Alembic's migrations, the newest being number `SCHEMA`.

A migration happens within the transaction of whoever needs it, so that a killed process leaves the old schema whole.
"""

from __future__ import annotations

from sqlalchemy import Connection

SCHEMA = 2
TABLE = "kb_schema"  # of Alembic; not its usual name, which another program in the same database may use
MIGRATIONS = "kb.store:migrations"


def upgrade(connection: Connection, schema: int) -> None:
    """Migrate from number `schema` (0: an empty database) to `SCHEMA`, in the transaction that has begun."""
    # Importing Alembic takes longer than a search; it is needed once in the life of a database.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", MIGRATIONS)
    if schema == 1:  # the first one was made without Alembic, which writes nothing down for a second time
        command.stamp(config, revision(1))
    command.upgrade(config, revision(SCHEMA))


def revision(schema: int) -> str:
    """What Alembic calls a schema: `0002`."""
    return f"{schema:04d}"

"""The schema of the store and its migrations by Alembic; `SCHEMA` is the newest number.

A migration is part of the transaction that needs it, so a killed process leaves the old schema intact.
"""

from __future__ import annotations

from sqlalchemy import Connection

SCHEMA = 3
TABLE = "kb_schema"  # Alembic's; another program in this database may use its usual name
MIGRATIONS = "kb.store:migrations"


def upgrade(connection: Connection, schema: int, to: int = SCHEMA) -> None:
    """Migrate from number `schema` (0: an empty database) to number `to`, in the current transaction."""
    # Importing Alembic takes longer than a search, and few writes need a migration.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", MIGRATIONS)
    if schema == 1:  # created without Alembic, which must not create it again
        command.stamp(config, revision(1))
    command.upgrade(config, revision(to))


def revision(schema: int) -> str:
    """Alembic's name for a schema: `0002`."""
    return f"{schema:04d}"

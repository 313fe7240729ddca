"""The generation of the content: a number that tells all replicas of a service when to read the content again."""

from __future__ import annotations

from sqlmodel import col, select

from kb.store import audit
from kb.store.database import Database
from kb.store.tables import StateRow
from kb.store.upsert import insert

GENERATION = "generation"


def generation(database: Database) -> int:
    """The current number; 0 until the first `advance`."""
    with database.reading() as session:
        number = session.exec(select(StateRow.value).where(StateRow.name == GENERATION)).first() if session else 0
        return number or 0


def advance(database: Database, *, actor: str = "", request_id: str = "") -> int:
    """Make every replica read its content again. Returns the new number."""
    with database.writing() as session:
        row = insert(session, StateRow, name=GENERATION, value=1)
        upsert = row.on_conflict_do_update(index_elements=["name"], set_={"value": StateRow.value + 1})
        number = int(session.execute(upsert.returning(col(StateRow.value))).scalar_one())
        audit.add(session, actor, "reindex", f"generations/{number}", request_id)
    return number

"""What all replicas of a service agree on: the number of the content that they should serve."""

from __future__ import annotations

from sqlmodel import col, select

from kb.store import audit
from kb.store.database import Database
from kb.store.tables import StateRow
from kb.store.upsert import insert

GENERATION = "generation"


def generation(database: Database) -> int:
    """The number of the content; 0 until it was advanced for the first time."""
    with database.reading() as session:
        found = session.exec(select(StateRow.value).where(StateRow.name == GENERATION)).first() if session else 0
        return found or 0


def advance(database: Database, *, actor: str = "", request_id: str = "") -> int:
    """Ask every replica to read its content again; the new number."""
    with database.writing() as session:
        row = insert(session, StateRow, name=GENERATION, value=1)
        more = row.on_conflict_do_update(index_elements=["name"], set_={"value": StateRow.value + 1})
        number = int(session.execute(more.returning(col(StateRow.value))).scalar_one())
        audit.add(session, actor, "reindex", f"generations/{number}", request_id)
    return number

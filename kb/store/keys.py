"""API keys: `kb_<id>_<secret>`, shown once and stored as a hash.

A secret has 256 random bits, so a plain SHA-256 is enough: slow hashes only protect secrets that can be guessed.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from sqlalchemy import or_, update
from sqlmodel import col, select

from kb.errors import UsageError
from kb.store import audit
from kb.store.database import Database
from kb.store.tables import KeyRow, UtcTime, now

FORM = re.compile(r"kb_([a-z0-9]{8})_[A-Za-z0-9_-]{43}")


class Scope(StrEnum):
    """What a key allows; each scope includes those before it."""

    READ = "read"
    REPORT = "report"
    ADMIN = "admin"

    def covers(self, other: Scope) -> bool:
        order = list(Scope)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class Key:
    """A key without its secret. Times are UTC."""

    id: str
    name: str
    scope: Scope
    created_at: UtcTime
    revoked_at: UtcTime | None = None
    last_used_at: UtcTime | None = None


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key and the `fingerprint` of its text, against which requests are checked."""

    key: Key
    secret_hash: str


def new(database: Database, name: str, scope: Scope, *, actor: str = "", request_id: str = "") -> tuple[Key, str]:
    """Create a key. Returns it and its text, which is not stored. Raises `UsageError` for an unprintable name."""
    if not name.strip() or not name.isprintable():
        raise UsageError(f"a key cannot be called {name!r}", "name who or what uses it: `ci`, `node 7`, `chatbot`")
    key = Key("".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8)), name, scope, now())
    text = f"kb_{key.id}_{secrets.token_urlsafe(32)}"
    row = KeyRow(id=key.id, name=name, scope=scope, created_at=key.created_at, secret_hash=fingerprint(text))
    with database.writing() as session:
        session.add(row)
        audit.add(session, actor, "key.new", f"keys/{key.id}", request_id)
    return key, text


def parse(text: str) -> str | None:
    """The id in the text of a key; None if the text is not a key."""
    match = FORM.fullmatch(text)
    return match.group(1) if match else None


def fingerprint(text: str) -> str:
    """The hash that is stored instead of the text of a key."""
    return sha256(text.encode(errors="replace")).hexdigest()


def revoke(database: Database, key_id: str, *, actor: str = "", request_id: str = "") -> None:
    """Revoke a key permanently. Raises `UsageError` if no key has this id."""
    with database.writing() as session:
        row = session.get(KeyRow, key_id)
        if row is None:
            raise UsageError(f"no key has the id {key_id!r}", "`kb key list` shows every key")
        if row.revoked_at is None:
            row.revoked_at = now()
            audit.add(session, actor, "key.revoke", f"keys/{key_id}", request_id)


def list_all(database: Database) -> list[StoredKey]:
    """All keys, including revoked ones, in the order of their creation."""
    with database.reading() as session:
        if session is None:
            return []
        rows = session.exec(select(KeyRow).order_by(col(KeyRow.created_at), col(KeyRow.id)))
        return [StoredKey(_key(row), row.secret_hash) for row in rows]


def record_uses(database: Database, uses: Mapping[str, UtcTime]) -> None:
    """Record when keys were last used, by id. A time before the stored one changes nothing."""
    if not uses:
        return
    with database.writing() as session:
        for key_id, at in sorted(uses.items()):  # in a fixed order, so that two processes cannot deadlock
            is_later = or_(col(KeyRow.last_used_at).is_(None), col(KeyRow.last_used_at) < at)
            session.execute(update(KeyRow).where(col(KeyRow.id) == key_id, is_later).values(last_used_at=at))


def _key(row: KeyRow) -> Key:
    return Key(row.id, row.name, Scope(row.scope), row.created_at, row.revoked_at, row.last_used_at)

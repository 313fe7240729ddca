"""`kb key`: the API keys of a service. One is shown when it is made and never again."""

from __future__ import annotations

import datetime
import getpass
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..terminal.output import JsonFlag, clock, emit, notice, style

if TYPE_CHECKING:
    from kb.store.keys import Key

key = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="KB_DATABASE_URL",
        help="URL of the service's database, or path of a SQLite file; your own store without.",
    ),
]
ScopeOption = Annotated[
    Literal["read", "report", "admin"],  # of kb.store.keys, which every command would pay for
    typer.Option("--scope", help="read; report: also send reports; admin: everything."),
]


@key.callback()
def _keys() -> None:
    """Make, list and revoke the API keys of a service."""


@key.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who uses it, to know it again in the list.")],
    scope: ScopeOption = "read",
    as_json: JsonFlag = False,
    database: DatabaseOption = None,
) -> int:
    """Make a key and print it: now, and never again."""
    from kb.store import keys
    from kb.store.database import Database

    with Database.open(database) as opened:
        made, text = keys.new(opened, name, keys.Scope(scope), actor=_actor())
        place = opened.name
    if as_json:
        emit("key", key=_document(made), secret=text)
        return 0
    print(text)
    notice(f"kept as a hash in {place}: copy it now. It goes into the header `Authorization: Bearer kb_...`")
    notice(f"`kb key revoke {made.id}` ends it")
    return 0


@key.command("list")
def list_(as_json: JsonFlag = False, database: DatabaseOption = None) -> int:
    """List the keys, revoked ones too. Exit code 0 when there is one, 1 when there is none."""
    from kb.store import keys
    from kb.store.database import Database

    with Database.open(database) as opened:
        found = [stored.key for stored in keys.everything(opened)]
        with opened.reading() as session:
            is_begun = session is not None
        place = opened.name
    if as_json:
        emit("key", keys=[_document(one) for one in found])
    elif found:
        _print(found)
    elif is_begun:
        print(f"no key yet in {place}. `kb key new <name>` makes one.")
    else:
        print(f"no key yet: nothing was ever kept in {place}. `kb key new <name>` begins it; or is the place wrong?")
    return 0 if found else 1


@key.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Its id, as `kb key list` shows it.")],
    as_json: JsonFlag = False,
    database: DatabaseOption = None,
) -> int:
    """End a key for good. A running service refuses it within seconds."""
    from kb.store import keys
    from kb.store.database import Database

    with Database.open(database) as opened:
        keys.revoke(opened, key_id, actor=_actor())
    if as_json:
        emit("key", revoked=key_id)
    else:
        notice(f"{key_id} is revoked")
    return 0


def _actor() -> str:
    """Who is at this machine, for the audit log."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a container may run as a number that has no name
        return f"cli:{os.getuid()}"


def _print(keys: list[Key]) -> None:
    print(style(f"{'id':<8}  {'scope':<6}  {'created':<16}  {'last used':<16}  {'revoked':<16}  name", bold=True))
    for one in keys:
        times = "  ".join(f"{_local(at):<16}" for at in (one.created_at, one.last_used_at, one.revoked_at))
        print(style(f"{one.id}  {one.scope:<6}  {times}  {one.name}", dim=one.revoked_at is not None))


def _document(one: Key) -> dict[str, Any]:
    return {
        "id": one.id,
        "name": one.name,
        "scope": one.scope,
        "created_at": _utc(one.created_at),
        "last_used_at": _utc(one.last_used_at),
        "revoked_at": _utc(one.revoked_at),
    }


def _utc(at: datetime.datetime | None) -> str | None:
    return at.replace(tzinfo=datetime.UTC).isoformat(timespec="seconds") if at else None


def _local(at: datetime.datetime | None) -> str:
    return clock(at.replace(tzinfo=datetime.UTC)) if at else "-"

"""`kb key`: the API keys of a service. A key is shown only once, when it is created."""

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
        help="URL of the service's database, or path of a SQLite file. Default: your own store.",
    ),
]
ScopeOption = Annotated[
    Literal["read", "report", "admin"],  # repeated from kb.store.keys, whose import would slow down every command
    typer.Option("--scope", help="read; report: also send reports; admin: everything."),
]


@key.callback()
def _keys() -> None:
    """Create, list and revoke the API keys of a service."""


@key.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who uses the key: its name in the list.")],
    scope: ScopeOption = "read",
    as_json: JsonFlag = False,
    database: DatabaseOption = None,
) -> int:
    """Create a key and print it. It cannot be shown again."""
    from kb.store import keys
    from kb.store.database import Database

    with Database.open(database) as opened:
        new_key, text = keys.new(opened, name, keys.Scope(scope), actor=_actor())
        place = opened.name
    if as_json:
        emit("key", key=_document(new_key), secret=text)
        return 0
    print(text)
    notice(f"stored as a hash in {place}: copy the key now. It goes into the header `Authorization: Bearer kb_...`")
    notice(f"`kb key revoke {new_key.id}` revokes it")
    return 0


@key.command("list")
def list_(as_json: JsonFlag = False, database: DatabaseOption = None) -> int:
    """List the keys, including revoked ones. Exit code 0 if there are any, 1 if there are none."""
    from kb.store import keys
    from kb.store.database import Database

    with Database.open(database) as opened:
        stored_keys = [stored.key for stored in keys.list_all(opened)]
        with opened.reading() as session:
            exists = session is not None
        place = opened.name
    if as_json:
        emit("key", keys=[_document(key_) for key_ in stored_keys])
    elif stored_keys:
        _print(stored_keys)
    elif exists:
        print(f"no key yet in {place}. `kb key new <name>` creates one.")
    else:
        print(f"no key yet: nothing is stored in {place} yet. `kb key new <name>` creates it; or is the place wrong?")
    return 0 if stored_keys else 1


@key.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the key, as `kb key list` shows it.")],
    as_json: JsonFlag = False,
    database: DatabaseOption = None,
) -> int:
    """Revoke a key permanently. A running service refuses it within seconds."""
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
    """The user of this machine, for the audit log."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a container may run under a user id without a name
        return f"cli:{os.getuid()}"


def _print(keys: list[Key]) -> None:
    print(style(f"{'id':<8}  {'scope':<6}  {'created':<16}  {'last used':<16}  {'revoked':<16}  name", bold=True))
    for key_ in keys:
        times = "  ".join(f"{_local(at):<16}" for at in (key_.created_at, key_.last_used_at, key_.revoked_at))
        print(style(f"{key_.id}  {key_.scope:<6}  {times}  {key_.name}", dim=key_.revoked_at is not None))


def _document(key_: Key) -> dict[str, Any]:
    return {
        "id": key_.id,
        "name": key_.name,
        "scope": key_.scope,
        "created_at": _utc(key_.created_at),
        "last_used_at": _utc(key_.last_used_at),
        "revoked_at": _utc(key_.revoked_at),
    }


def _utc(at: datetime.datetime | None) -> str | None:
    return at.replace(tzinfo=datetime.UTC).isoformat(timespec="seconds") if at else None


def _local(at: datetime.datetime | None) -> str:
    return clock(at.replace(tzinfo=datetime.UTC)) if at else "-"

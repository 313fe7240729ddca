"""`kb key`: a key is shown once, listed without its secret, and revoked by its id."""

from __future__ import annotations

from pathlib import Path

import pytest

from kb.store import audit, keys
from kb.store.database import Database
from tests.support.console import Kb

pytest_plugins = ["tests.support.postgres_fixtures"]


def test_a_new_key_is_the_only_thing_on_stdout(kb: Kb) -> None:
    made = kb("key", "new", "node 7", "--scope", "report")
    [stored] = keys.list_all(Database.open())
    assert made.out == made.out.strip() + "\n"
    assert keys.fingerprint(made.out.strip()) == stored.secret_hash
    assert (stored.key.name, stored.key.scope) == ("node 7", keys.Scope.REPORT)
    assert f"kb key revoke {stored.key.id}" in made.err
    assert made.out.strip() not in made.err


def test_without_a_scope_a_key_may_only_read(kb: Kb) -> None:
    document = kb("key", "new", "chatbot", "--json").json
    assert (document["schema"], document["key"]["scope"]) == ("kb.key.v1", "read")
    assert keys.parse(document["secret"]) == document["key"]["id"]


def test_the_list_shows_every_key_and_no_secret(kb: Kb) -> None:
    assert (kb("key", "list").code, kb("key", "list", "--json").json["keys"]) == (1, [])
    secret = kb("key", "new", "one").out.strip()
    gone = kb("key", "new", "two", "--json").json["key"]["id"]
    kb("key", "revoke", gone)
    listed, document = kb("key", "list"), kb("key", "list", "--json")
    assert listed.code == 0
    assert [line.split()[0] for line in listed.out.splitlines()[1:]] == [item["id"] for item in document.json["keys"]]
    assert [(item["name"], bool(item["revoked_at"])) for item in document.json["keys"]] == [
        ("one", False),
        ("two", True),
    ]
    assert secret.split("_", 2)[2] not in listed.out + document.out
    assert keys.list_all(Database.open())[0].secret_hash not in listed.out + document.out


def test_making_and_revoking_are_in_the_audit_log_with_who_did_it(kb: Kb) -> None:
    made = kb("key", "new", "one", "--json", LOGNAME="maya").json["key"]["id"]
    assert kb("key", "revoke", made, LOGNAME="maya").code == 0
    lines = [(item.actor, item.action, item.subject) for item in audit.page(Database.open())]
    assert lines == [("cli:maya", "key.revoke", f"keys/{made}"), ("cli:maya", "key.new", f"keys/{made}")]


@pytest.mark.parametrize(
    "arguments",
    [("revoke", "nobodys0"), ("new", "a\nb"), ("new", "x", "--scope", "root"), ("list", "--database", "mysql://h/d")],
    ids=lambda arguments: arguments[0],
)
def test_what_makes_no_sense_is_a_usage_error_and_makes_nothing(kb: Kb, arguments: tuple[str, ...]) -> None:
    ended = kb("key", *arguments, "--json")
    assert ended.code == 2
    assert ended.json["ok"] is False
    assert keys.list_all(Database.open()) == []


def test_keys_of_a_service_are_where_its_database_is(kb: Kb, postgres_url: str, tmp_path: Path) -> None:
    kb("key", "new", "by variable", KB_DATABASE_URL=postgres_url)
    kb("key", "new", "by option", "--database", postgres_url, KB_DATABASE_URL=str(tmp_path / "elsewhere.db"))
    with Database.open(postgres_url) as opened:
        assert [stored.key.name for stored in keys.list_all(opened)] == ["by variable", "by option"]
    assert keys.list_all(Database.open()) == []
    assert not (tmp_path / "elsewhere.db").exists()


def test_a_place_where_nothing_was_ever_kept_is_named_and_stays_as_it_is(
    kb: Kb, empty_postgres_url: str, tmp_path: Path
) -> None:
    where = tmp_path / "nope" / "x.db"
    for url, name in ((f"sqlite:///{where}", str(where)), (empty_postgres_url, Database.open(empty_postgres_url).name)):
        listed = kb("key", "list", KB_DATABASE_URL=url)
        assert (listed.code, f"nothing is stored in {name}" in listed.out) == (1, True)
    assert not where.parent.exists()
    with Database.open(where) as opened:
        opened.prepare()
    listed = kb("key", "list", KB_DATABASE_URL=f"sqlite:///{where}")
    assert (listed.code, "nothing is stored" in listed.out, str(where) in listed.out) == (1, False, True)

"""A store of an earlier kb is taken over whole, and one of a later kb is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlmodel import Session

from kb.errors import StoreUnavailable
from kb.store import sqlite
from kb.store.database import Database
from kb.store.reports import AddedReport, add_shared, history, page, save, verdict_counts
from kb.store.schema import MIGRATIONS, SCHEMA, TABLE, revision
from tests.support.earlier_stores import differences, make_second, report, run, schema

pytest_plugins = ["tests.support.postgres_fixtures"]

QUIET = """
import sys
from kb.store.database import Database
from kb.store.reports import history, save

with Database.open(sys.argv[1]) as database:
    save(database, [])
    assert len(history(database)) == 3
sys.exit("alembic" in sys.modules)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def second(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    is_file = request.param == "sqlite"
    with Database.open(tmp_path / "reports.db" if is_file else request.getfixturevalue("empty_postgres_url")) as opened:
        make_second(opened)
        yield opened


def test_the_newest_migration_has_the_number_of_the_schema() -> None:
    assert ScriptDirectory(str(Path(sqlite.__file__).with_name("migrations"))).get_heads() == [revision(SCHEMA)]
    assert MIGRATIONS == "kb.store:migrations"


def test_migrations_lead_to_the_tables_that_the_code_has(earlier: str) -> None:
    with Database.open(earlier) as opened:
        assert differences(opened) == []
        assert schema(opened) == SCHEMA


def test_a_store_of_the_first_kb_is_taken_over_with_its_reports(first: Path) -> None:
    with Database.open(first) as opened:
        save(opened, [report("d")])
        assert [item["id"] for item in history(opened)] == ["d", "c", "b", "a"]
        assert history(opened, "a") == [report("a")]


def test_a_store_of_the_second_schema_loses_a_column_and_no_report(second: Database) -> None:
    assert schema(second) == 2
    reports = page(second)
    assert [report.document["id"] for report in reports] == ["c", "b", "a"]
    assert differences(second) == []
    assert [(row.entry_id, row.gpu, row.count) for row in verdict_counts(second)] == [(n, "H100", 1) for n in "abc"]
    again = add_shared(second, report("c"), "node", "c", "digest")
    assert again == AddedReport(reports[0].id, is_new=False)
    assert add_shared(second, report("d"), "node", "d", "digest").id > again.id


def test_looking_at_a_store_of_the_first_kb_takes_it_over_too(first: Path) -> None:
    with Database.open(first) as opened:
        assert [item["id"] for item in history(opened)] == ["c", "b", "a"]
        assert schema(opened) == SCHEMA


def test_alembic_is_loaded_only_when_a_migration_is_due(first: Path) -> None:
    Database.open(first).prepare()
    run(QUIET, first)


def test_a_newer_schema_on_a_server_is_refused_and_left_alone(postgres_url: str) -> None:
    with Database.open(postgres_url) as opened:
        with opened.writing() as session:
            session.connection().exec_driver_sql(f"UPDATE {TABLE} SET version_num='{revision(SCHEMA + 1)}'")
        for use in (lambda: save(opened, [report("a")]), lambda: history(opened), opened.prepare):
            with pytest.raises(StoreUnavailable, match=f"its schema is {SCHEMA + 1}, this one knows {SCHEMA}"):
                use()
        with Session(opened.backend.engine) as session:
            assert session.connection().exec_driver_sql("SELECT count(*) FROM report").scalar() == 0


def test_a_database_of_another_program_on_a_server_gets_no_tables_of_ours(empty_postgres_url: str) -> None:
    with Database.open(empty_postgres_url) as opened:
        with opened.backend.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE report (mine int)")
        with pytest.raises(StoreUnavailable, match="already exists") as caught:
            save(opened, [report("a")])
        assert "database of its own" in caught.value.hint
        assert schema(opened) == 0

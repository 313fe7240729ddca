"""A migration that is killed, crowded, out of disk or cut off leaves the earlier schema with its reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import event

from kb.errors import StoreUnavailable
from kb.store.database import Database
from kb.store.reports import history
from kb.store.schema import SCHEMA
from tests.support.earlier_stores import differences, schema
from tests.support.postgres_server import Server
from tests.support.store_programs import run_program

pytest_plugins = ["tests.support.postgres_fixtures"]


def test_a_migration_that_is_killed_after_any_write_leaves_the_earlier_schema(earlier: str) -> None:
    with Database.open(earlier) as opened:
        before = schema(opened) if opened.backend.exists() else 0
        schemas = json.loads(
            run_program("migrate_killed", earlier)
        )  # before each attempt, which is killed one write later
        assert schemas.count(before) > 10
        assert schemas == sorted(schemas)
        assert set(schemas) <= {before, SCHEMA}
        assert differences(opened) == []
        assert len(history(opened)) == (3 if before else 0)


def test_processes_that_find_an_earlier_schema_at_once_migrate_it_once(earlier: str) -> None:
    assert json.loads(run_program("migrate_together", earlier)) == [0] * 4
    with Database.open(earlier) as opened:
        assert differences(opened) == []


def test_a_disk_that_fills_up_during_a_migration_leaves_the_earlier_schema(first: Path) -> None:
    result = run_program("migrate_until_full", first)
    assert "cannot be written" in result
    assert "space" in result
    with Database.open(first) as opened:
        assert schema(opened) == 1
        assert [item["id"] for item in history(opened)] == ["c", "b", "a"]


def test_a_server_that_dies_during_a_migration_leaves_the_earlier_schema(
    postgres: Server, empty_postgres_url: str
) -> None:
    statements = iter(range(12))
    with Database.open(empty_postgres_url) as opened:

        def kill(*_: object) -> None:
            if next(statements, -1) == 11:
                postgres.kill()

        event.listen(opened.backend.engine, "after_cursor_execute", kill)
        with pytest.raises(StoreUnavailable, match="cannot be written"):
            opened.prepare()
        postgres.start()
        assert schema(opened) == 0
        opened.prepare()
        assert differences(opened) == []

"""Fixtures: where a store is to be, and stores of an earlier kb."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.earlier_stores import make_first


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kb" / "reports.db"


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return make_first(tmp_path / "kb" / "reports.db")


@pytest.fixture(params=["sqlite, empty", "sqlite, first", "postgresql, empty"])
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store that is to be migrated."""
    if request.param == "postgresql, empty":
        url: str = request.getfixturevalue("empty_postgres_url")
        return url
    path = tmp_path / "kb" / "reports.db"
    return f"sqlite:///{make_first(path) if request.param == 'sqlite, first' else path}"

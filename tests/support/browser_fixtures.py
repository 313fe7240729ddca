"""A Chromium for a module, a service for all of them. A test file says `pytest_plugins = ["tests.support.browser_fixtures"]`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.chromium import filled_service, launched
from tests.support.programs import program
from tests.support.replicas import Replica


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, built_in_index: Path) -> Iterator[Replica]:
    """One for all tests with a browser."""
    program("chromium")  # without it no service is started for nothing
    with filled_service(tmp_path_factory.mktemp("service"), built_in_index) as replica:
        yield replica

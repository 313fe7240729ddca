"""A Chromium per module and a service for all. Use with `pytest_plugins = ["tests.support.browser_fixtures"]`."""

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
    """The service for all tests with a browser."""
    program("chromium")  # skips before a service is started in vain
    with filled_service(tmp_path_factory.mktemp("service"), built_in_index) as replica:
        yield replica

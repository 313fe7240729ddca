"""The directories of a user follow the XDG Base Directory Specification, on Linux and on macOS."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kb.paths import cache_home, data_home


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("value", [None, "", "relative/path", "."])
def test_without_an_absolute_value_the_default_counts(
    platform: str, value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    assert cache_home() == tmp_path / ".cache" / "kb"
    assert data_home() == tmp_path / ".local" / "share" / "kb"


def test_an_absolute_value_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    monkeypatch.setenv("XDG_DATA_HOME", "/var/lib/")
    assert (cache_home(), data_home()) == (Path("/var/cache/kb"), Path("/var/lib/kb"))

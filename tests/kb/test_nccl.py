from __future__ import annotations

from pathlib import Path

import pytest

from kb import packages
from kb.nccl import NCCL_PACKAGES, nccl_release, nccl_setting

NAME = "NCCL_SOCKET_IFNAME"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (NAME, "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_of_several_packages_the_newest_cuda_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = dict(zip(NCCL_PACKAGES, ("", "2.21.5", "2.19.3"), strict=True))
    monkeypatch.setattr(packages, "version", installed.__getitem__)
    assert nccl_release() == (2, 21, 5)


def test_the_environment_wins_over_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".nccl.conf").write_text(f"NCCL_DEBUG=WARN\n{NAME} = eth1\n")
    assert nccl_setting(NAME) == ("eth1", str(home / ".nccl.conf"))
    monkeypatch.setenv(NAME, "bond0")
    assert nccl_setting(NAME) == ("bond0", "environment")
    monkeypatch.setenv(NAME, "")
    assert nccl_setting(NAME) == ("", "environment"), "NCCL does not overwrite an empty variable"


def test_a_file_that_is_named_takes_the_place_of_that_of_the_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".nccl.conf").write_text(f"{NAME}=eth1\n")
    (tmp_path / "other.conf").write_text(f"{NAME}=eth2\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "other.conf"))
    assert nccl_setting(NAME) == ("eth2", str(tmp_path / "other.conf"))


def test_a_file_that_cannot_be_read_sets_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CONF_FILE", str(home))
    assert nccl_setting("NCCL_THAT_NOTHING_SETS") == ("", "")

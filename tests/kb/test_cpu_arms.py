"""The limit on address space lets a process allocate what has room, and no more; pip runs in another environment."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from kb.cpu_arms import pip_in
from kb.probe import Unavailable
from tests.support.console import GENEROUS_S

MIB = 1 << 20


def allocates(mib: int, room_mib: int) -> bool:
    """Whether a process with this much room can allocate a block. A fresh one: a fork could use what its parent freed."""
    code = f"from kb.cpu_arms import limit_address_space as limit; limit({room_mib * MIB}); bytearray({mib * MIB})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GENEROUS_S)
    assert ended.returncode == 0 or "MemoryError" in ended.stderr, ended.stderr
    return ended.returncode == 0


def test_only_what_has_room_can_be_allocated() -> None:
    assert allocates(32, room_mib=64)
    assert not allocates(96, room_mib=64)


def test_pip_sees_the_packages_of_the_other_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    command = [*pip_in(str(tmp_path / "env/bin/python")), "list", "--format", "json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS_S, check=True)
    assert json.loads(ended.stdout) == []


def test_no_pip_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Unavailable, match="pip is missing"):
        pip_in(sys.executable)

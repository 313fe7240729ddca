"""kb.machine.snapshot: a snapshot has every part, a reason for what it lacks, and nobody's name."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kb.machine.snapshot import MachineSnapshot, capture

PYTHON = Path(sys.executable)


def nulls(value: Any, path: str = "") -> Iterator[str]:
    """Dotted path of every null in a document."""
    if value is None:
        yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nulls(item, f"{path}.{key}".lstrip("."))


@pytest.fixture
def no_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_smi")
def test_every_null_has_a_reason() -> None:
    snapshot = capture(PYTHON, import_torch=True)
    document = json.loads(json.dumps(snapshot.to_json()))
    fine = {"python.torch_import.error"}  # no error is no gap in our knowledge
    assert set(nulls(document)) - set(snapshot.reasons) - fine == set()
    assert snapshot.gpus is None
    assert snapshot.reasons["gpus"] == snapshot.reasons["driver.topology"] == "nvidia-smi is not installed"


@pytest.mark.usefixtures("no_smi")
def test_an_interpreter_that_is_not_there_costs_nothing_else(tmp_path: Path) -> None:
    snapshot = capture(tmp_path / "python")
    assert snapshot.interpreter == tmp_path / "python"
    assert snapshot.python is None
    assert "cannot be started" in snapshot.reasons["python"]
    assert snapshot.host["kernel"]
    assert snapshot.limits["nofile"]
    assert snapshot.network["nics"]


def test_names_neither_the_host_nor_its_addresses() -> None:
    written = json.dumps(capture(PYTHON).to_json())
    assert f'"{socket.gethostname()}"' not in written
    assert "127.0.0.1" not in written


@pytest.mark.parametrize(
    ("free", "limit", "used", "usable"),
    [
        (4000, 512, 200, 312),
        (100, 512, 200, 100),
        (4000, 512, 600, 0),
        (4000, "unlimited", 200, 4000),
        (4000, None, None, 4000),
        (None, 512, 200, None),
    ],
)
def test_usable_memory_is_the_lesser_of_machine_and_cgroup(free: Any, limit: Any, used: Any, usable: Any) -> None:
    result = MachineSnapshot(
        interpreter=PYTHON,
        host={"memory_available_mib": free},
        cgroup={"memory_limit_mib": limit, "memory_used_mib": used},
    )
    assert result.usable_memory_mib == usable

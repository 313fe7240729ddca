"""`kb doctor` as a reader meets it."""

from __future__ import annotations

import sys
from pathlib import Path

from support import Kb


def test_an_interpreter_is_found_as_every_other_command_finds_it(kb: Kb, home: Path) -> None:
    (home / "env").mkdir()
    python = home / "env" / "python"
    python.symlink_to(sys.executable)
    findings = kb("doctor", "--json", "--python", "~/env/python").json["findings"]
    (torch,) = (finding for finding in findings if finding["subject"] == "torch")
    assert str(python) in torch["message"]
    assert "is not an interpreter" not in torch["message"]

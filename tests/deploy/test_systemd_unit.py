"""deploy/kb.service: systemd reads it without a complaint, and it lets the service do little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.console import CHECKOUT, KB, Ended
from tests.support.programs import program
from tests.support.replicas import Place, started

UNIT = CHECKOUT / "deploy" / "kb.service"
MOST_EXPOSED = 15  # tenths; what systemd calls OK begins at 4.9


def analyze(*args: str | Path) -> Ended:
    ended = subprocess.run(
        [program("systemd-analyze"), *map(str, args)], capture_output=True, text=True, timeout=60, check=False
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with the program where it is on this machine."""
    path = tmp_path / "kb.service"
    path.write_text(UNIT.read_text().replace("/opt/kb/bin/kb ", f"{KB} "))
    return path


def test_systemd_verifies_it(unit: Path) -> None:
    ended = analyze("verify", "--man=no", unit)
    assert (ended.code, ended.err) == (0, "")


def test_a_misspelt_line_would_be_noticed(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHouse=yes"))
    assert "ProtectHouse" in analyze("verify", "--man=no", unit).err


def test_little_is_exposed(unit: Path) -> None:
    ended = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSED}", unit)
    assert ended.code == 0, ended.out


def test_a_wrong_option_ends_it_for_good_as_the_unit_says() -> None:
    code = next(line for line in UNIT.read_text().splitlines() if line.startswith("RestartPreventExitStatus="))
    ended = subprocess.run([str(KB), "serve", "--port", "none"], capture_output=True, timeout=60, check=False)
    assert code == f"RestartPreventExitStatus={ended.returncode}"


def test_it_answers_nobody_without_a_key_whatever_stands_before_it() -> None:
    assert "\nEnvironment=KB_ANONYMOUS=nobody\n" in UNIT.read_text()


WITHOUT_NEW_CODE = """
import ctypes, os, sys

PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
ctypes.CDLL(None).prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0)  # Linux before 6.3 does not know it
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_it_serves_where_memory_never_becomes_code(tmp_path: Path, home: Path) -> None:
    """As under MemoryDenyWriteExecute=: no library of the service makes machine code while it runs."""
    place = Place(tmp_path, home / "cache")
    with started(place, prefix=[sys.executable, "-c", WITHOUT_NEW_CODE]) as replica:
        assert replica.get("/v1/search?q=NCCL+timeout")[0] == 200
        assert replica.get("/v1/search?q=保存")[0] == 200

"""Answers at the width of a terminal: no id is broken, nothing is cut."""

from __future__ import annotations

import io
import sys
from pkgutil import resolve_name

import pytest

LONG_ID = "checkpoint-save-allgather-timeout"
TITLE = "One rank ran out of memory, the others report only an NCCL timeout"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[40, 80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("NO_COLOR", "1")
    return int(request.param)


def test_a_tree_keeps_its_ids_and_its_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    branch = resolve_name("kb.cli.terminal.tree:Branch")
    leaf = branch(LONG_ID, TITLE, "cyan")
    tree = branch("a", TITLE, "cyan", (branch("caused by", branches=(leaf, branch("b", TITLE, "cyan", (leaf,)))),))
    lines = list(resolve_name("kb.cli.terminal.tree:tree_lines")(tree))
    assert max(map(len, lines)) <= width
    assert sum(LONG_ID in line for line in lines) == 2
    assert " ".join("".join(line.lstrip("│├└ ") + " " for line in lines).split()).count(TITLE) == 4


def test_an_earlier_verdict_stays_in_its_columns(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    report = {
        "id": LONG_ID,
        "verdict": "not-applicable",
        "fidelity": "hardware",
        "started_at": "2026-03-01T23:30:00+00:00",
        "duration_s": 1234.5,
        "earlier_wording": False,
    }
    resolve_name("kb.cli.commands.history:_print")([report])
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any(LONG_ID in line for line in lines)
    assert "1234.5 s" in lines[-1]

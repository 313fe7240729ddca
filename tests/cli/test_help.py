"""Help: `-h` everywhere, and a bare `kb`."""

from __future__ import annotations

import pytest

from tests.support.console import Kb


@pytest.mark.parametrize("command", ["", "search", "verify", "key", "key new"])
def test_h_is_help(kb: Kb, command: str) -> None:
    short, long = (kb(*command.split(), option) for option in ("-h", "--help"))
    assert (short.code, short.err) == (0, "")
    assert short.out == long.out
    assert short.out.startswith(f"Usage: kb {command}".rstrip())


@pytest.mark.parametrize("command", ["", "key"])
def test_a_group_without_a_command_shows_its_help_and_no_error(kb: Kb, command: str) -> None:
    ended = kb(*command.split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Usage: ")
    assert "Commands:" in ended.err
    assert "error" not in ended.err

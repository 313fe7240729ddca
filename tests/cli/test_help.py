"""Help: of each command, `-h` everywhere, a bare `kb`, and a command that there is not."""

from __future__ import annotations

import pytest

from tests.support.console import Kb

COMMANDS = ["search", "show", "verify", "list", "env", "history", "serve", "lint", "index", "doctor"]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_says_what_it_is_for(kb: Kb, command: str) -> None:
    ended = kb(command, "--help")
    assert ended.code == 0
    assert len(ended.out.splitlines()) > 5
    assert f"{command} " in kb("--help").out


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


def test_an_unknown_command_is_a_usage_error(kb: Kb) -> None:
    ended = kb("serach", "timeout", "--json")
    assert ended.code == 2
    assert ended.json["error"]["type"] == "usage-error"

"""Lines for a terminal: what is copied from them stays whole."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

LONG = "kb verify oom-activations --python /path/to/your/training/env/bin/python"


@pytest.mark.parametrize("width", range(10, 60, 7))
def test_a_command_is_on_one_line(width: int) -> None:
    text = f"Verify it here, then apply the fix (`kb show oom-activations`). Or `{LONG}`. 然后运行 `kb verify oom`,再看 checkpoint-save。"
    lines = [text[start:end] for start, end in resolve_name("kb.cli.terminal.wrapping:breaks")(text, width)]
    for whole in ("`kb show oom-activations`", f"`{LONG}`", "`kb verify oom`", "checkpoint-save"):
        assert any(whole in line for line in lines), lines
    assert "".join("".join(lines).split()) == "".join(text.split())

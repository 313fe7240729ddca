"""Turns the advice of a check into a command to run."""

from __future__ import annotations

import re

SETTING = r"--set (?:[^\s,;()`'\"]|'[^'`]*'|\"[^\"`]*\")+"
SETTINGS = re.compile(rf"{SETTING}(?: {SETTING})*")


def with_command(advice: str, entry_id: str) -> str:
    """The advice, with its settings as a command that takes them."""
    return advice if "`" in advice else SETTINGS.sub(rf"`kb verify {entry_id} \g<0>`", advice)

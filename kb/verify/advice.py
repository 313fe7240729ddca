"""What a check advises, as something to run."""

from __future__ import annotations

import re

SETTING = r"--set (?:[^\s,;()`'\"]|'[^'`]*'|\"[^\"`]*\")+"
SETTINGS = re.compile(rf"{SETTING}(?: {SETTING})*")


def with_command(advice: str, entry_id: str) -> str:
    """The same advice, with the command that takes the settings it names."""
    return advice if "`" in advice else SETTINGS.sub(rf"`kb verify {entry_id} \g<0>`", advice)

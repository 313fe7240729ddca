"""`kb` for a program that starts its command itself: passes its streams to a fork, and ends like it.

Usage: `python -I -S warm_command.py ADDRESS ARGUMENTS`, with the address of the process that forks.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.console import GENEROUS_S
from tests.support.warm_start import ADDRESS, MCP, start_warm


def warm_command(*args: str | Path) -> list[str]:
    return [sys.executable, "-I", "-S", __file__, ADDRESS.lstrip("\0"), *map(str, args)]


if __name__ == "__main__":
    address, *arguments = sys.argv[1:]
    sys.exit(start_warm(*arguments, imports=MCP, address=f"\0{address}", stdin=0, stdout=1, stderr=2).wait(GENEROUS_S))

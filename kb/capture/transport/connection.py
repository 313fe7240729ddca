"""A node and the command that runs the agent there. A node without a name is this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

AGENT = ("python3", "-I", "-S", "-")  # runs on a node: only the interpreter, which reads the agent from stdin


@dataclass(frozen=True, slots=True)
class Connection:
    """`command` reads the agent on its stdin and writes what it returns. `as_root` says how to capture as root."""

    name: str
    command: tuple[str, ...]
    as_root: str = "`sudo kb capture`"
    environment: Mapping[str, str] | None = field(default=None, repr=False)  # None: kb's environment

    @property
    def is_here(self) -> bool:
        return not self.name


def here(pid: int | None = None, python: str = sys.executable) -> Connection:
    """The connection to this machine; `pid` is a process of the job, for the remedies."""
    named = f" --pid {pid}" if pid else ""
    return Connection("", (python, *AGENT[1:]), f"`sudo kb capture{named}`")

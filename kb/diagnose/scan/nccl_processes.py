"""The rank of a process that prints NCCL's debug output, learned from its earlier lines."""

from __future__ import annotations

import re

MOST_PROCESSES = 100_000

_NCCL = re.compile(r"([\w.-]{1,255}|<host-\d{1,9}>):(\d{1,9}):\d{1,9} \[-?\d{1,4}\] ", re.ASCII)
_INIT = re.compile(r"\brank (\d{1,6}) n[Rr]anks (\d{1,6}) .{0,200}\bInit (?:START|COMPLETE)", re.ASCII)


class NcclProcesses:
    """The rank of each process (`host:pid`), learned from its `Init START` and `Init COMPLETE` lines.

    Such a line gives the rank within one communicator. The largest communicator is assumed to be the job's. A process
    with two ranks in communicators of that size (it has several GPUs, or the job has only groups) has no rank.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, int | None] = {}
        self._size = 0

    def rank(self, text: str) -> int | None:
        """The rank of the process that printed `text`, a line without prefixes; also learns from the line."""
        process = _NCCL.match(text)
        if process is None:
            return None
        name = f"{process[1]}:{process[2]}"
        if init := _INIT.search(text, process.end(), process.end() + 500):
            self._learn(name, int(init[1]), int(init[2]))
        return self._ranks.get(name)

    def _learn(self, name: str, rank: int, size: int) -> None:
        if size > self._size:
            self._ranks, self._size = {}, size
        if size == self._size and (name in self._ranks or len(self._ranks) < MOST_PROCESSES):
            self._ranks[name] = rank if self._ranks.get(name, rank) == rank else None

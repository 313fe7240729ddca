"""Ranks that a line does not name: by the file it is in, or by what its process said earlier."""

from __future__ import annotations

import re

MOST_PROCESSES = 100_000

# A rank within a group of tensor or data parallel ranks, or on a node, names no process of the job.
_FILE = re.compile(r"(?:^|[^A-Za-z])(?P<of>[A-Za-z]*)[_-]?rank[_-]?(?P<rank>\d{1,6})(?!\d)", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"(?:console|debug|dump|err|global|job|log|nccl|out|output|run|stderr|stdout|trace|train|world)?")
_TORCHRUN = re.compile(r"attempt_\d{1,6}/(\d{1,6})/(?:stdout\.log|stderr\.log|error\.json)(?:\.gz|\.zst)?$", re.ASCII)

_NCCL = re.compile(r"([\w.-]{1,255}|<host-\d{1,9}>):(\d{1,9}):\d{1,9} \[-?\d{1,4}\] ", re.ASCII)
_INIT = re.compile(r"\brank (\d{1,6}) n[Rr]anks (\d{1,6}) .{0,200}\bInit (?:START|COMPLETE)", re.ASCII)


def rank_of(path: str) -> int | None:
    """The rank whose output a file is, when its name says so for certain.

    `rank_3.log`, `rank3.out`, `rank3/stderr.log`, `nccl_trace_rank_3`, and `attempt_0/3/stderr.log` of torchrun's
    `--log-dir`, whose number counts on one node. `log.3` is as often a rotated log, `slurm-123_3.out` a job of an
    array, `worker-3` a node, `mp_rank_3` a rank of a group: None.
    """
    path = path.replace("\\", "/")
    if match := _TORCHRUN.search(path):
        return int(match[1])
    for part in reversed(path.split("/")):
        for match in _FILE.finditer(part):
            if _WHOLE.fullmatch(match["of"].lower()):
                return int(match["rank"])
    return None


class Processes:
    """The rank of each process (`host:pid`) of NCCL's debug output, learned from its `Init START` and `COMPLETE` lines.

    Such a line numbers its process within one communicator. The largest of all is the job; a process that has two
    numbers in communicators of that size (several GPUs in one process, or groups only) has no rank.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, int | None] = {}
        self._size = 0

    def rank(self, text: str) -> int | None:
        """That of the process that printed this line, as `parse` leaves it, by all lines so far; learns from it."""
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

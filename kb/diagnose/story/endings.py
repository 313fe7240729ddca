"""Reads how ranks ended from lines of launchers, schedulers, the kernel and the C++ runtime."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kb.diagnose.failure_lines import is_failure, is_launcher
from kb.diagnose.story.lines import StoryLine
from kb.diagnose.watchdog import EXIT_CODE, EXIT_RANK

FIRST = re.compile(r"Root Cause \(first observed failure\)")
FAILED = re.compile(r"failed \(exitcode: (-?\d{1,5})\) local_rank: (\d{1,6}) \(pid: (\d+)\)")
TASK = re.compile(
    r"srun: error: \S+ tasks? (\d[\d,-]{0,200}): "
    r"(Killed|Segmentation fault|Aborted|Bus error|Terminated|Out Of Memory|Exited with exit code (\d{1,3}))"
)
TASK_CODES = {
    "Killed": -9,
    "Out Of Memory": -9,
    "Segmentation fault": -11,
    "Aborted": -6,
    "Bus error": -7,
    "Terminated": -15,
}
SPAWNED = re.compile(r"[Pp]rocess (\d{1,6}) terminated with (?:signal SIG(\w{2,6})|exit code (\d{1,3}))")
NAMED = re.compile(r"\b[Rr]ank[ =:]{0,2}(\d{1,5})\b")
TERMINATED = re.compile(r"^\s*what\(\):\s+(.*)")
OOM_KILL = re.compile(r"oom[-_]kill|Out of memory: Killed process|OOM Killed|Detected \d+ oom", re.IGNORECASE)
RESTART = re.compile(
    r"attempts left; will restart worker group|Restarting worker group|Detected .{0,40}, will restart|Job requeued"
    r"|requeue|restarting (?:job|training|from checkpoint)",
    re.IGNORECASE,
)
# At its default log level, torchrun prints that workers failed, but not that it starts them again.
AGENT = re.compile(
    r"^\[?[EW]\d{4} [\d:.]+ (\d+) torch/distributed/elastic/multiprocessing/api\.py\S*\] failed \(exitcode"
)
TIMED_OUT = re.compile(r"Watchdog caught|Aborting process on rank|[Hh]eartbeat ?[Mm]onitor|Operation timed out after")
# DeepSpeed: the number of ranks, which are all in this log unless several nodes were named before.
STARTED = re.compile(r"\bdist_world_size=(\d{1,6})$")
NODES = re.compile(r"\bnnodes=(?!1\b)\d")
MOST_STARTED = 1024
RESTARTING = re.compile(r"[Rr]estart|[Rr]equeue|REQUEUE")
WORDS = re.compile(  # in the lines that may say how a rank ended
    r"Watchdog|Aborting|eartbeat|timed out|[Rr]ank|Process|exitcode|srun|terminated|what\(\):|dist_world_size|nnodes="
    r"|oom|OOM|memory|Root Cause"
)
SIGNALS = {
    -1: "SIGHUP",
    -2: "SIGINT",
    -4: "SIGILL",
    -6: "SIGABRT",
    -7: "SIGBUS",
    -8: "SIGFPE",
    -9: "SIGKILL",
    -11: "SIGSEGV",
    -15: "SIGTERM",
}
CODES = {name: code for code, name in SIGNALS.items()}
TERMINATION = -15
ABORT = -6
FATAL = (-4, -7, -8, -9, -11)  # signals that no launcher sends to stop a rank


def is_restart(text: str) -> bool:
    """Whether a line says that a launcher or scheduler starts the job again."""
    return bool(RESTARTING.search(text) and RESTART.search(text))


def has_given_up(text: str) -> bool:
    """Whether a line of an NCCL watchdog says that its rank gave up waiting."""
    return bool(TIMED_OUT.search(text))


def _tasks(text: str) -> Iterator[int]:
    """The tasks in a list of srun, such as `0,2-4`."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            start, end = int(first), int(last) if last.isdigit() else int(first)
            yield from range(start, min(end, start + MOST_STARTED) + 1)


@dataclass(frozen=True, slots=True)
class Ending:
    """The exit code of a rank, negative for a signal. `is_first`: the launcher names it the first failure."""

    rank: int
    code: int
    line: StoryLine
    is_first: bool = False

    @property
    def text(self) -> str:
        return SIGNALS.get(self.code, f"exit code {self.code}")


@dataclass(slots=True)
class Endings:
    """`read` all lines in order, then `close`.

    `errors` has the last failure line that names each rank. `aborts` are messages of uncaught C++ exceptions, which
    leave no traceback. `gave_up` has the first line of each rank's NCCL watchdog, which also ends the process in C++.
    `started` is the number of ranks if the launcher of a single node prints it, else 0.
    """

    by_rank: dict[int, Ending] = field(default_factory=dict)
    errors: dict[int, StoryLine] = field(default_factory=dict)
    aborts: list[StoryLine] = field(default_factory=list)
    oom_kills: list[StoryLine] = field(default_factory=list)
    gave_up: dict[int | None, StoryLine] = field(default_factory=dict)
    started: int = 0
    _has_nodes: bool = False
    _rank: int | None = None
    _is_first: bool = False
    _local: dict[int, Ending] = field(default_factory=dict)

    def read(self, line: StoryLine) -> None:
        text = line.text
        if not WORDS.search(text):
            return
        if NODES.search(text):
            self._has_nodes = True
        elif match := STARTED.search(text):
            self.started = 0 if self._has_nodes else min(int(match[1]), MOST_STARTED)
        elif FIRST.search(text):
            self._is_first = True
        elif match := EXIT_RANK.search(text):
            self._rank = int(match[1])
        elif (match := EXIT_CODE.search(text)) and self._rank is not None:
            self.by_rank[self._rank] = Ending(self._rank, int(match[1]), line, self._is_first)
            self._rank = None
        elif match := FAILED.search(text):
            self._local.setdefault(int(match[2]), Ending(int(match[2]), int(match[1]), line))
        elif match := TASK.search(text):
            for task in _tasks(match[1]):
                self._add(task, TASK_CODES.get(match[2], int(match[3] or 1)), line)
        elif match := SPAWNED.search(text):
            self._add(int(match[1]), CODES.get(f"SIG{match[2]}", int(match[3] or 1)), line)
        self._read_failure(line)

    def close(self) -> None:
        """Use the agent's lines only if there is no summary: they give local ranks, the summary global ones."""
        self.by_rank = self.by_rank or dict(self._local)

    @property
    def has_aborted_waiting(self) -> bool:
        """Whether C++ ended processes that waited. They leave no traceback, like processes that fail themselves."""
        return bool(self.gave_up or self.aborts)

    def _add(self, rank: int, code: int, line: StoryLine) -> None:
        self.by_rank.setdefault(rank, Ending(rank, code, line))

    def _read_failure(self, line: StoryLine) -> None:
        text = line.text
        if (named := NAMED.search(text)) and is_failure(text) and not is_launcher(text):
            self.errors[int(named[1])] = line
        if has_given_up(text):
            self.gave_up.setdefault(line.rank, line)
        if "what():" in text and TERMINATED.search(text):
            self.aborts.append(line)
        if OOM_KILL.search(text):
            self.oom_kills.append(line)

"""Processes as /proc shows them: process trees, their memory and shared memory, and signals that never hit a recycled
pid. `kb.harness.subprocesses` runs commands.

Standard library and Python 3.9 only: the guard uses it in the reader's training interpreter.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Dict, List, Optional, Set  # works on Python 3.9


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat. Pid and `start` (clock ticks since boot) together identify a process for good."""

    pid: int
    parent: int
    start: int
    state: str
    name: str

    @property
    def is_alive(self) -> bool:
        return self.state not in "ZX"


def read_process(pid: int) -> Optional[Process]:
    """The process, or None if it no longer exists."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            head, _, tail = file.read().decode(errors="replace").rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    return Process(pid, int(fields[1]), int(fields[19]), fields[0], head.partition("(")[2])


def is_running(process: Process) -> bool:
    """Whether this very process still runs; a zombie, or another process with its pid, does not count."""
    now = read_process(process.pid)
    return now is not None and now.start == process.start and now.is_alive


def descendants(root: int) -> List[Process]:
    """Every live process below `root`. Complete if `root` is a child subreaper, to which orphans come back."""
    children: Dict[int, List[Process]] = {}
    for name in os.listdir("/proc"):
        process = read_process(int(name)) if name.isdigit() else None
        if process:
            children.setdefault(process.parent, []).append(process)
    alive: List[Process] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        alive += [process for process in below if process.is_alive]
        waiting += [process.pid for process in below]
    return alive


def listed_descendants(root: int) -> List[Process]:
    """The same from the kernel's lists of children, in a time that does not grow with the machine.

    A process may be missing while another exits (proc_pid_task_children(5)): enough to watch, not to end a tree.
    """
    if not os.path.exists("/proc/self/task/%d/children" % os.getpid()):  # a kernel without CONFIG_PROC_CHILDREN
        return descendants(root)
    found: List[Process] = []
    waiting = [root]
    while waiting:
        pids = _children(waiting.pop())
        waiting += pids
        found += [process for process in map(read_process, pids) if process and process.is_alive]
    return found


def _children(pid: int) -> List[int]:
    """The children of all threads of a process; empty once it has ended."""
    pids: List[int] = []
    try:
        for thread in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, thread)) as file:
                pids += map(int, file.read().split())
    except OSError:
        pass
    return pids


def send_signal(process: Process, signal_number: signal.Signals) -> None:
    """Signal exactly this process; do nothing if it is gone or its pid now belongs to another process."""
    now = read_process(process.pid)
    if now and now.start == process.start:
        try:
            os.kill(process.pid, signal_number)
        except OSError:
            pass


def resident_bytes(processes: List[Process]) -> int:
    """The resident memory of these processes in total; a page that they share counts for each."""
    total = 0
    for process in processes:
        try:
            with open("/proc/%d/statm" % process.pid) as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


def shared_memory_files(processes: List[Process]) -> Set[str]:
    """The files under /dev/shm that these processes map or hold open."""
    paths: Set[str] = set()
    try:
        if not os.listdir("/dev/shm"):  # reading all maps costs far more
            return paths
    except OSError:  # missing, or not readable by us: the maps show the files
        pass
    for process in processes:
        try:
            with open("/proc/%d/maps" % process.pid) as file:
                paths.update(line.split(None, 5)[5].rstrip("\n") for line in file if "/dev/shm/" in line)
            for descriptor in os.listdir("/proc/%d/fd" % process.pid):
                paths.add(os.readlink("/proc/%d/fd/%s" % (process.pid, descriptor)))
        except (OSError, IndexError):
            continue
    return {path for path in paths if path.startswith("/dev/shm/") and not path.endswith("(deleted)")}


def waiting_in(process: Process) -> str:
    """State and kernel wait channel, for instance `S futex_do_wait`; in state D a driver does not return."""
    try:
        with open("/proc/%d/wchan" % process.pid) as file:
            return ("%s %s" % (process.state, file.read())).strip()
    except OSError:
        return process.state

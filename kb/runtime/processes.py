"""Processes as /proc shows them: the tree below one, their memory and shared memory, and signals that never hit a
recycled pid. Commands that kb runs itself: `kb.harness.subprocesses`.

Standard library and Python 3.9: the guard uses it in the reader's training interpreter.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Dict, List, Optional, Set  # Python 3.9 reads these


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
    """The process, or None when it no longer exists."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            head, _, tail = file.read().decode(errors="replace").rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    return Process(pid, int(fields[1]), int(fields[19]), fields[0], head.partition("(")[2])


def is_running(process: Process) -> bool:
    """Whether this very process still runs; neither a zombie nor another one with its pid counts."""
    now = read_process(process.pid)
    return now is not None and now.start == process.start and now.is_alive


def descendants(root: int) -> List[Process]:
    """Every live process below `root`. Complete when `root` is a child subreaper: orphans come back to it."""
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
    """As `descendants`, read from the kernel's lists of children: in a time that does not grow with the machine.

    One may be missing while another exits (proc_pid_task_children(5)): enough to watch, not enough to end a tree.
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
    """Of all threads of a process; none once it has ended."""
    pids: List[int] = []
    try:
        for thread in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, thread)) as file:
                pids += map(int, file.read().split())
    except OSError:
        pass
    return pids


def send_signal(process: Process, signal_number: signal.Signals) -> None:
    """Signal exactly this process; does nothing when it is gone or its pid now belongs to another."""
    now = read_process(process.pid)
    if now and now.start == process.start:
        try:
            os.kill(process.pid, signal_number)
        except OSError:
            pass


def resident_bytes(processes: List[Process]) -> int:
    """Resident memory of these processes together; pages they share count for each."""
    total = 0
    for process in processes:
        try:
            with open("/proc/%d/statm" % process.pid) as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


def shared_memory_files(processes: List[Process]) -> Set[str]:
    """Files under /dev/shm that these processes map or hold open."""
    paths: Set[str] = set()
    try:
        if not os.listdir("/dev/shm"):  # to read all maps costs far more
            return paths
    except OSError:  # not there, or not ours to list: the maps tell
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
    """State and kernel wait channel, for instance `S futex_do_wait`; state D is a driver that does not return."""
    try:
        with open("/proc/%d/wchan" % process.pid) as file:
            return ("%s %s" % (process.state, file.read())).strip()
    except OSError:
        return process.state

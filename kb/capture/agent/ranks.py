"""Finds the ranks of the jobs on this node by their environment, what launched them, and what they loaded.

A shell around a rank and its workers have its variables too; the rank is the topmost of these processes that has loaded
torch. `/proc/PID/environ` is the environment at the start of a process, so ranks that set their variables themselves
(mp.spawn, Lightning's first process) are found by their parent and siblings.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from .processes import RANK_NAMES, Stat, arguments, environment, libraries, pids, stat

OF_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
SPAWNED = "multiprocessing.spawn"


class Process(NamedTuple):
    pid: int
    parent: int
    start: int
    name: str
    environment: Dict[str, str]
    arguments: List[str]
    libraries: List[str]
    netns: str

    @property
    def has_torch(self) -> bool:
        return any("/libtorch" in path for path in self.libraries)

    def rank(self) -> "Tuple[Optional[int], str]":
        """The rank and the variable that gives it."""
        for name in RANK_NAMES:
            if self.environment.get(name, "").isdigit():
                return int(self.environment[name]), name
        return None, ""


class Rank(NamedTuple):
    """`source` says how the rank is known: a variable, or a guess in words. `rank` is None if it is not known."""

    process: Process
    rank: Optional[int]
    source: str


def survey(skipped: Sequence[int], write: Any) -> None:
    """Write two lines of JSON per process, the first with its pid: if the second is missing, the process blocked."""
    own = _ancestors(os.getpid())
    for pid in pids():
        now = stat(pid)
        if now is None or now.is_kernel or now.state in "ZX" or pid in own:
            continue
        line: Dict[str, Any] = {"pid": pid, "parent": now.parent, "start": now.start, "name": now.name}
        write(json.dumps({"begin": line}) + "\n")
        if pid in skipped:
            continue
        try:
            line["environment"], line["arguments"] = environment(pid), arguments(pid)
            has_rank = any(name in line["environment"] for name in (*RANK_NAMES, "LOCAL_RANK"))
            line["libraries"] = libraries(pid) if has_rank or is_python(pid) else []
            line["netns"] = os.readlink("/proc/%d/ns/net" % pid)
        except PermissionError:
            line["denied"] = os.stat("/proc/%d" % pid).st_uid
        except OSError:  # it has ended
            continue
        write(json.dumps(line) + "\n")


def read_survey(text: str) -> "Tuple[List[Process], List[Dict[str, Any]], Optional[int]]":
    """The processes that could be read, those of other users, and the pid of the one that blocked, if any."""
    known, denied = [], []
    begun: Optional[int] = None
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:  # cut
            continue
        if "begin" in document:
            begun = document["begin"]["pid"]
            continue
        begun = None
        if "denied" in document:
            denied.append(document)
        else:
            known.append(Process(*(document[name] for name in Process._fields)))
    return known, denied, begun


def is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink("/proc/%d/exe" % pid))
    except OSError:
        return False


def _ancestors(pid: int) -> Set[int]:
    found: Set[int] = set()
    while pid and pid not in found:
        found.add(pid)
        now: Optional[Stat] = stat(pid)
        pid = now.parent if now else 0
    return found


def job_key(process: Process) -> Tuple[str, ...]:
    """A key that is equal for ranks of one job; ranks with one address may be in several steps of a Slurm job."""
    values = [process.environment.get(name, "") for name in OF_JOB]
    if all(values[:2]):
        values[-1] = ""
    return (process.netns, *values)


class Family:
    """The processes of the node by pid."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self.by_pid = {process.pid: process for process in processes}
        self.children: Dict[int, List[Process]] = {}
        for process in self.by_pid.values():
            self.children.setdefault(process.parent, []).append(process)

    def above(self, process: Process) -> List[Process]:
        """The ancestors of a process, the parent first."""
        found: List[Process] = []
        parent = self.by_pid.get(process.parent)
        while parent and parent not in found:
            found.append(parent)
            parent = self.by_pid.get(parent.parent)
        return found

    def below(self, pid: int) -> List[Process]:
        found, waiting = [], [pid]
        while waiting:
            children = self.children.get(waiting.pop(0), [])
            found += children
            waiting += [child.pid for child in children]
        return found


def find_ranks(family: Family) -> List[Rank]:
    """The ranks, found by their variables, or else by their parents and siblings."""
    ranks = _by_variable(family)
    taken = {rank.process.pid for rank in ranks}
    for rank in (*_by_local_rank(family, taken), *_by_parent(family, taken)):
        ranks.append(rank)
    return sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0, rank.process.pid))


def _by_variable(family: Family) -> List[Rank]:
    """The topmost process with torch of each rank, and ranks that are still importing it."""
    chosen: Dict[int, Rank] = {}
    for process in family.by_pid.values():
        rank, name = process.rank()
        if rank is None or not process.has_torch:
            continue
        above = [other for other in family.above(process) if other.has_torch and other.rank() == (rank, name)]
        # Under Slurm, the launcher has its own rank variable and has loaded torch; its children have RANK.
        is_launcher = any(RANK_NAMES.index(below.rank()[1]) < RANK_NAMES.index(name)
                          for below in family.below(process.pid) if below.rank()[1] and below.has_torch)  # fmt: skip
        if not above and not is_launcher:
            chosen[process.pid] = Rank(process, rank, name)
    keys = {job_key(rank.process) for rank in chosen.values()}
    numbers = {(job_key(rank.process), rank.rank) for rank in chosen.values()}
    for process in family.by_pid.values():  # ranks that are importing torch, if others of their job have it
        rank, name = process.rank()
        if rank is None or "python" not in process.name or job_key(process) not in keys or name != "RANK":
            continue
        if (job_key(process), rank) not in numbers:
            numbers.add((job_key(process), rank))
            chosen[process.pid] = Rank(process, rank, name)
    return list(chosen.values())


def _by_local_rank(family: Family, taken: Set[int]) -> List[Rank]:
    """Ranks of Lightning, whose first process is the first rank of the node and starts the others with LOCAL_RANK."""
    found: List[Rank] = []
    for process in family.by_pid.values():
        local = process.environment.get("LOCAL_RANK", "")
        if not local.isdigit() or not process.has_torch or process.pid in taken or process.rank()[1]:
            continue
        if any(other.environment.get("LOCAL_RANK") == local for other in family.above(process)):
            continue
        siblings = [other for other in family.children.get(process.parent, []) if "LOCAL_RANK" in other.environment]
        numbers = [
            int(other.environment["LOCAL_RANK"]) for other in siblings if other.environment["LOCAL_RANK"].isdigit()
        ]
        node, on_node = process.environment.get("NODE_RANK", "0"), max(numbers) + 1
        first = int(node if node.isdigit() else 0) * on_node
        found.append(Rank(process, first + int(local), "LOCAL_RANK and NODE_RANK"))
        parent = family.by_pid.get(process.parent)
        if parent and parent.has_torch and 0 not in numbers and parent.pid not in taken:
            found.append(Rank(parent, first, "it started the other ranks of the node"))
            taken.add(parent.pid)
        taken.add(process.pid)
    return found


def _by_parent(family: Family, taken: Set[int]) -> List[Rank]:
    """Ranks of mp.spawn: children of a process with torch that have torch and their own connections, in start order."""
    found: List[Rank] = []
    for pid, children in sorted(family.children.items()):
        parent = family.by_pid.get(pid)
        if parent is None or not parent.has_torch or pid in taken or parent.rank()[1]:
            continue
        if any(other.pid in taken for other in (*family.above(parent), *family.below(pid))):
            continue
        alike = sorted((child for child in children if child.has_torch), key=lambda child: (child.start, child.pid))
        inherited = connections(pid)
        if len(alike) > 1 and any(connections(child.pid) - inherited for child in alike):
            found += [
                Rank(child, number, "order in which process %d started them" % pid)
                for number, child in enumerate(alike)
            ]
            taken.update(child.pid for child in alike)
    return found


def connections(pid: int) -> Set[str]:
    """The inodes of a process's sockets; a forked child also has its parent's."""
    found: Set[str] = set()
    try:
        for name in os.listdir("/proc/%d/fd" % pid):
            target = os.readlink("/proc/%d/fd/%s" % (pid, name))
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass
    return found

"""Takes Python stacks with py-spy, which reads a process's memory without pausing it, and explains failures.

`--nonblocking` is the default: it stops nothing, so it is harmless, and it works on processes that are stopped or in
uninterruptible sleep, for which a pausing py-spy never returns. `--native` pauses and is used for a few processes only.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import zlib
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence

from .processes import read, stat
from .steps import Outcome, Step, run

TOOL = "py-spy"
LIMIT_S, NATIVE_S = 3.0, 12.0
TRIES = 3  # a read may fail, since the process runs on meanwhile
SYS_PTRACE = 1 << 19
LEAST_FREE_KIB = 1 << 20  # memory for `--native`, which takes up to 330 MB
MOST_NATIVE = 3
FRAME = re.compile(r"^ {4,}\S.* \(.+:\d+\)$", re.MULTILINE)
VOLATILE = re.compile(
    r"^(Process|Python|Parent Process) .*$|0x[0-9a-f]+|\(idle\)|\(active[^)]*\)|Thread \d+", re.MULTILINE
)


class Target(NamedTuple):
    """A process to capture; `where` is its folder in the bundle."""

    where: str
    pid: int
    start: int


def find_tool(programs: Iterable[str]) -> str:
    """The path of py-spy, on PATH or next to one of these programs; empty if there is none.

    It runs as this user, so one that belongs to another user (except root) is not used.
    """
    beside = (os.path.join(os.path.dirname(program), TOOL) for program in programs if program.startswith("/"))
    for path in filter(None, (shutil.which(TOOL), *beside)):
        if os.access(path, os.X_OK) and os.stat(path).st_uid in (0, os.geteuid()):
            return path
    return ""


def sent_tool(data: str) -> str:
    """The path of a py-spy that kb sent, compressed, as base64. It is in memory, never on disk. Raises OSError."""
    descriptor = os.memfd_create(TOOL)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(zlib.decompress(base64.b64decode(data)))
    return "/proc/%d/fd/%d" % (os.getpid(), descriptor)


def take(tool: str, targets: Sequence[Target], name: str, deadline: float) -> List[Outcome]:
    """Take one stack per process, in order; retry if the reason of a failure may be temporary."""
    steps = [
        Step(name, target.where, LIMIT_S, (tool, "dump", "--nonblocking", "--pid", str(target.pid)))
        for target in targets
    ]
    outcomes = run(steps, deadline)
    for _ in range(TRIES - 1):
        failed = [number for number, outcome in enumerate(outcomes) if _may_succeed(outcome)]
        for number, outcome in zip(failed, run([steps[number] for number in failed], deadline)):
            outcomes[number] = outcome
    return [_checked(outcome) for outcome in outcomes]


def _may_succeed(outcome: Outcome) -> bool:
    lasting = ("ermission", "not permitted", "left out", "did not return", "No such", "not a python")
    return bool(_checked(outcome).error) and not any(reason in outcome.error for reason in lasting)


def _checked(outcome: Outcome) -> Outcome:
    if outcome.error or FRAME.search(outcome.output.decode("utf-8", "replace")):
        return outcome
    return outcome._replace(error="py-spy printed no frame")


def native(tool: str, groups: Sequence[Target], deadline: float) -> List[Outcome]:
    """Take C++ frames, one process at a time; not of stopped or uninterruptible ones, nor if memory is low.

    py-spy attaches with PTRACE_SEIZE, and the kernel resumes a process when its tracer ends, even if it is killed.
    Nevertheless, a process that is stopped afterwards is continued, and the outcome says so.
    """
    outcomes = []
    for target in groups[:MOST_NATIVE]:
        step = Step("native", target.where, NATIVE_S, (tool, "dump", "--native", "--pid", str(target.pid)))
        before = stat(target.pid)
        reason = _reason_against(target, before.state if before else "X", before.start if before else 0)
        if reason:
            outcomes.append(Outcome(step, b"", 0.0, "left out: " + reason))
            continue
        outcome = run([step], deadline)[0]
        after = stat(target.pid)
        if after and after.start == target.start and after.state in "Tt":
            os.kill(target.pid, signal.SIGCONT)
            outcome = outcome._replace(
                error=(outcome.error + "; it was stopped afterwards and was continued").strip("; ")
            )
        outcomes.append(outcome)
    return outcomes


def _reason_against(target: Target, state: str, start: int) -> str:
    if start != target.start or state in "ZX":
        return "the process has ended"
    if state in "TtD":
        return "the process is in state %s, where a pausing tool waits for ever" % state
    free = re.search(r"MemAvailable:\s+(\d+)", read("/proc/meminfo"))
    if free and int(free[1]) < LEAST_FREE_KIB:
        return "less than 1 GiB of memory is free"
    return ""


def distinct(targets: Sequence[Target], outcomes: Sequence[Outcome]) -> List[Target]:
    """One process of each group of equal stacks, the smallest group first, since the odd one matters most."""
    groups: Dict[str, List[Target]] = {}
    for target, outcome in zip(targets, outcomes):
        if not outcome.error:
            groups.setdefault(VOLATILE.sub("", outcome.output.decode("utf-8", "replace")), []).append(target)
    return [members[0] for members in sorted(groups.values(), key=len)]


def remedy(pid: int, as_root: str) -> str:
    """Why this user may not read the process, and how to change that; `as_root` says how to capture as root."""
    owner = _owner(pid)
    own = os.geteuid()
    yama = _yama()
    has_ptrace = bool(int(_status_field("self", "CapEff") or "0", 16) & SYS_PTRACE)
    if own != 0 and owner is not None and owner != own:
        return "it belongs to user %d: run as that user, or %s" % (owner, as_root)
    if yama == 3:
        return "kernel.yama.ptrace_scope is 3, which forbids it to everybody until the machine is started again"
    if yama == 2 and not has_ptrace:
        return "kernel.yama.ptrace_scope is 2: " + as_root
    if yama == 1 and not has_ptrace:
        return (
            "kernel.yama.ptrace_scope is 1: %s, or `sudo sysctl kernel.yama.ptrace_scope=0` "
            "for the time of the capture" % as_root
        )
    if not has_ptrace and os.stat("/proc/%d" % pid).st_uid != own:
        return "the process is not dumpable (PR_SET_DUMPABLE, or a changed user): " + as_root
    if not has_ptrace:
        return (
            "this container lacks CAP_SYS_PTRACE: `docker run --cap-add SYS_PTRACE`, "
            "`kubectl debug --profile=general --target=CONTAINER`, or run kb on the host"
        )
    return "a security module of this machine forbids it (see `dmesg`): run kb on the host as root"


def _owner(pid: int) -> Optional[int]:
    uid = _status_field(str(pid), "Uid").split()
    return int(uid[0]) if uid else None


def _status_field(pid: str, name: str) -> str:
    try:
        found = re.search(r"^%s:\s*(.*)$" % name, read("/proc/%s/status" % pid), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def _yama() -> int:
    try:
        return int(read("/proc/sys/kernel/yama/ptrace_scope"))
    except (OSError, ValueError):
        return 0


def explain(outcome: Outcome, pid: int, as_root: str) -> Dict[str, Any]:
    """The error of a stack for the report; if ptrace is refused, with the remedy."""
    error = outcome.error
    if "ermission" in error or "not permitted" in error:
        return {"error": "ptrace is refused: " + remedy(pid, as_root)}
    return {"error": error}

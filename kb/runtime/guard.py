"""The guard of one arm: starts its ranks, enforces its deadline, and removes everything the arm left.

It is forked from the fork server, in its own session, as a child subreaper. Whatever a rank starts, forks twice or
moves to another session stays below the guard, so the process tree to end is always known. If the supervisor is killed,
the guard ends the tree, deletes the directory and exits. Standard library and Python 3.9 only. Its record goes into
`guard.json` in the arm's directory.

    start ranks -> poll (exits, deadline, memory, supervisor) -> evidence -> TERM, grace, KILL -> record
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NoReturn, Set  # works on Python 3.9

from kb.runtime import evidence, processes

POLL_S = 0.01
SURVEY_S = 0.25  # how often memory and shared-memory files of the tree are read
GRACE_S = 1.0  # between TERM and KILL
LATE_S = 0.7  # helpers such as multiprocessing's resource tracker outlive their rank by up to this much
NO_RECORD = 74  # exit code, EX_IOERR of sysexits.h
KILLED_S = 5.0  # a killed process that still exists after this is stuck in the kernel and gets reported


class _Watch:
    """The mutable record of one arm while it runs."""

    def __init__(self, spec: Dict[str, Any]) -> None:
        self.spec = spec
        self.begun = time.monotonic()
        self.ranks: Dict[int, int] = {}  # pid -> rank
        self.exits: List[Dict[str, Any]] = []
        self.shared_memory: Set[str] = set()
        self.peak_bytes = 0
        self.ending = ""
        self.supervisor = select.poll()

    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def running(self) -> List[int]:
        gone = {rank_exit["pid"] for rank_exit in self.exits}
        return [pid for pid in self.ranks if pid not in gone]


def main(spec: Dict[str, Any], rank_main: Callable[[Dict[str, Any], int], NoReturn]) -> NoReturn:
    """Run the arm that `spec` describes; ranks are forks that call `rank_main`, or fresh interpreters."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # standard output is for the fork server's messages
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    libc.prctl(1, 0)  # no death signal: the guard cleans up even if the fork server has died
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = _Watch(spec)
    try:
        watch.supervisor.register(0, 0)  # POLLHUP only: the other end closes when the supervisor ends
        _start(watch, rank_main)
        _poll(watch)
        _end(watch)
    except OSError:  # nothing can be recorded, usually because the disk is full; only the exit code can report it
        _kill(watch, LATE_S)
        os._exit(NO_RECORD)
    except BaseException:
        _kill(watch, LATE_S)
        raise
    os._exit(0)


def _start(watch: _Watch, rank_main: Callable[[Dict[str, Any], int], NoReturn]) -> None:
    spec = watch.spec
    for rank in range(spec["world_size"]):
        pid = os.fork()
        if pid == 0:
            try:
                _become_rank(spec, rank, rank_main)
            finally:
                os._exit(70)
        watch.ranks[pid] = rank


def _become_rank(spec: Dict[str, Any], rank: int, rank_main: Callable[[Dict[str, Any], int], NoReturn]) -> NoReturn:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    log = os.open(os.path.join(spec["dir"], "rank%d.log" % rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    if spec["execute"]:
        start = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")
        environment = {**os.environ, **spec["env"]}
        argv = [sys.executable, start, "worker", os.path.join(spec["dir"], "spec.json"), str(rank)]
        os.execve(sys.executable, argv, environment)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    rank_main(spec, rank)


def _poll(watch: _Watch) -> None:
    """Return when all ranks have exited, or with `watch.ending` set to the reason the arm is cut short."""
    spec = watch.spec
    deadline = spec["deadline_s"]
    next_look = 0.0
    while watch.running():
        _reap(watch)
        if watch.supervisor.poll(0):
            _vanish(watch)
        if any(rank_exit["code"] != 0 for rank_exit in watch.exits):
            deadline = min(deadline, watch.exits[0]["at"] + spec["settle_s"])
        if watch.running() and watch.elapsed() > deadline:
            watch.ending = "deadline" if deadline == spec["deadline_s"] else "settled"
            return
        if watch.elapsed() >= next_look:
            next_look = watch.elapsed() + SURVEY_S
            tree = processes.listed_descendants(os.getpid())
            watch.shared_memory |= processes.shared_memory_files(tree)
            watch.peak_bytes = max(watch.peak_bytes, processes.resident_bytes(tree))
            if watch.peak_bytes > spec["memory_cap_bytes"]:
                watch.ending = "memory cap"
                return
        time.sleep(POLL_S)


def _tree(watch: _Watch) -> List[processes.Process]:
    """Every live process below the guard.

    Orphans come back to a subreaper: if it has no child, there are none, and /proc, which may be long, is not read.
    """
    return processes.descendants(os.getpid()) if _reap(watch) else []


def _reap(watch: _Watch) -> bool:
    """Collect the children that have ended. Returns whether others are left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid in watch.ranks:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            at = round(watch.elapsed(), 3)
            watch.exits.append({"pid": pid, "rank": watch.ranks[pid], "code": code, "at": at, "time": time.time()})
            watch.exits.sort(key=lambda rank_exit: (rank_exit["code"] == 0, rank_exit["at"]))  # the first failure leads


def _end(watch: _Watch) -> None:
    """Collect evidence, end the tree (TERM, grace, KILL), and write the record with what is left."""
    cut = watch.running()
    waiting = evidence.collect(watch.spec, {pid: watch.ranks[pid] for pid in cut}) if watch.ending else {}
    if not watch.ending:
        _wait_until_gone(watch, LATE_S)
    strays = [process for process in _tree(watch) if process.pid not in watch.ranks]
    survivors = _kill(watch, GRACE_S)
    record = {
        "ending": watch.ending or "all exited",
        "exits": watch.exits,
        "cut": [watch.ranks[pid] for pid in cut],
        "evidence": waiting,
        "strays": [] if watch.ending else ["%s (pid %d)" % (p.name, p.pid) for p in strays],
        "leftovers": ["process %s (pid %d, %s)" % (p.name, p.pid, processes.waiting_in(p)) for p in survivors]
        + _remove_shared_memory(watch),
        "duration_s": round(watch.elapsed(), 3),
        "peak_mib": watch.peak_bytes >> 20,
    }
    _write_summary(watch, cut)
    evidence.write_atomically(os.path.join(watch.spec["dir"], "guard.json"), json.dumps(record).encode())


def _write_summary(watch: _Watch, cut: List[int]) -> None:
    """Write `launcher.log`: ranks that died of a signal, and so printed nothing, in the form of torchrun's summary."""
    killed = [rank_exit for rank_exit in watch.exits if rank_exit["code"] < 0 and rank_exit["pid"] not in cut]
    if killed:
        Path(watch.spec["dir"], "launcher.log").write_text("".join(map(_summary, killed)))


def _summary(rank_exit: Dict[str, Any]) -> str:
    number = -rank_exit["code"]
    return (
        "  rank      : %(rank)d (local_rank: %(rank)d)\n  exitcode  : %(code)d (pid: %(pid)d)\n" % rank_exit
    ) + "  traceback : Signal %d (%s) received by PID %d\n" % (number, _signal_name(number), rank_exit["pid"])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "SIG%d" % number


def _kill(watch: _Watch, grace_s: float) -> List[processes.Process]:
    """End every descendant. Returns those that did not end within `KILLED_S` of KILL."""
    tree = _tree(watch)
    for process in tree:
        processes.send_signal(process, signal.SIGTERM)
        if process.state == "T":  # a stopped process handles TERM only after it continues
            processes.send_signal(process, signal.SIGCONT)
    if tree:
        _wait_until_gone(watch, grace_s)
    end = time.monotonic() + KILLED_S
    while True:  # in rounds, since a process may fork between listing and killing
        tree = _tree(watch)
        if not tree or time.monotonic() > end:
            return tree
        for process in tree:
            processes.send_signal(process, signal.SIGKILL)
        _wait_until_gone(watch, 0.2)


def _wait_until_gone(watch: _Watch, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not _tree(watch):
            return
        time.sleep(POLL_S)
    _reap(watch)


def _remove_shared_memory(watch: _Watch) -> List[str]:
    """Delete what the tree created under /dev/shm. Returns a sentence for each file that could not be deleted."""
    left = []
    for path in sorted(watch.shared_memory):
        try:
            is_foreign = os.stat(path).st_uid != os.geteuid() or os.stat(path).st_ctime < watch.spec["started"]
        except OSError:
            continue
        if not is_foreign:
            try:
                os.unlink(path)
            except OSError as error:
                left.append("shared memory %s (%s)" % (path, error.strerror))
    return left


def _vanish(watch: _Watch) -> NoReturn:
    """End the tree, delete the directory and exit: without a supervisor nobody reads a record."""
    _kill(watch, 0.2)
    _remove_shared_memory(watch)
    shutil.rmtree(watch.spec["dir"], ignore_errors=True)
    os._exit(0)

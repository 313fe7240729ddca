"""The guard of one arm: starts its ranks, keeps its deadline, and leaves no trace of it.

Forked from the fork server, in its own session, as child subreaper: whatever a rank starts, forks twice
or moves to another session stays below the guard, so the tree to end is always known. It goes on when the
supervisor is killed: then it ends the tree, deletes the directory and itself.
Standard library and Python 3.9. What it saw goes into `guard.json` in the arm's directory.

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
from typing import Any, Callable, Dict, List, NoReturn, Set  # Python 3.9 reads these

from kb.runtime import processes

POLL_S = 0.01
LOOK_AROUND_S = 0.25  # how often memory and shared-memory files of the tree are read
GRACE_S = 1.0  # between TERM and KILL
LATE_S = 0.7  # helpers such as multiprocessing's resource tracker outlive their rank by this much
NO_RECORD = 74  # exit code, EX_IOERR of sysexits.h
KILLED_S = 5.0  # a killed process that is still there after this sits in the kernel: report it


class _Watch:
    """Mutable record of one arm while it runs."""

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
        gone = {one["pid"] for one in self.exits}
        return [pid for pid in self.ranks if pid not in gone]


def main(spec: Dict[str, Any], rank_main: Callable[[Dict[str, Any], int], NoReturn]) -> NoReturn:
    """Run the arm that `spec` describes; ranks are forks that call `rank_main`, or fresh interpreters."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the fork server's answers go there, not ours
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    libc.prctl(1, 0)  # the fork server may die before us: we still have to clean up
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = _Watch(spec)
    try:
        watch.supervisor.register(0, 0)  # only POLLHUP: the other end closes when the supervisor is gone
        _start(watch, rank_main)
        _poll(watch)
        _end(watch)
    except OSError:  # nothing can be recorded, mostly because the disk is full: the exit code has to say it
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
    """Return when all ranks have exited, or with `watch.ending` set to why the arm is cut short."""
    spec = watch.spec
    deadline = spec["deadline_s"]
    next_look = 0.0
    while watch.running():
        _reap(watch)
        if watch.supervisor.poll(0):
            _vanish(watch)
        if any(one["code"] != 0 for one in watch.exits):
            deadline = min(deadline, watch.exits[0]["at"] + spec["settle_s"])
        if watch.running() and watch.elapsed() > deadline:
            watch.ending = "deadline" if deadline == spec["deadline_s"] else "settled"
            return
        if watch.elapsed() >= next_look:
            next_look = watch.elapsed() + LOOK_AROUND_S
            tree = processes.descendants(os.getpid())
            watch.shared_memory |= processes.shared_memory_files(tree)
            watch.peak_bytes = max(watch.peak_bytes, processes.resident_bytes(tree))
            if watch.peak_bytes > spec["memory_cap_bytes"]:
                watch.ending = "memory cap"
                return
        time.sleep(POLL_S)


def _reap(watch: _Watch) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in watch.ranks:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            at = round(watch.elapsed(), 3)
            watch.exits.append({"pid": pid, "rank": watch.ranks[pid], "code": code, "at": at, "time": time.time()})
            watch.exits.sort(key=lambda one: (one["code"] == 0, one["at"]))  # the first failure leads


def _end(watch: _Watch) -> None:
    """Evidence, then TERM, grace, KILL, then what is left; write the record."""
    evidence = _evidence(watch) if watch.ending else {}
    cut = watch.running()
    if not watch.ending:
        _wait_until_gone(watch, LATE_S)
    strays = [p for p in processes.descendants(os.getpid()) if p.pid not in watch.ranks]
    survivors = _kill(watch, GRACE_S)
    record = {
        "ending": watch.ending or "all exited",
        "exits": watch.exits,
        "cut": [watch.ranks[pid] for pid in cut],
        "evidence": evidence,
        "strays": [] if watch.ending else ["%s (pid %d)" % (p.name, p.pid) for p in strays],
        "leftovers": ["process %s (pid %d, %s)" % (p.name, p.pid, processes.waiting_in(p)) for p in survivors]
        + _remove_shared_memory(watch),
        "duration_s": round(watch.elapsed(), 3),
        "peak_mib": watch.peak_bytes >> 20,
    }
    _write_summary(watch, cut)
    path = os.path.join(watch.spec["dir"], "guard.json")
    with open(path + ".part", "w") as file:
        json.dump(record, file)
    os.rename(path + ".part", path)


def _write_summary(watch: _Watch, cut: List[int]) -> None:
    """Ranks that died of a signal, which leave no word of their own, as torchrun's summary puts it: `launcher.log`."""
    died = [one for one in watch.exits if one["code"] < 0 and one["pid"] not in cut]
    text = "".join(
        "  rank      : %(rank)d (local_rank: %(rank)d)\n  exitcode  : %(code)d (pid: %(pid)d)\n" % one
        + "  traceback : Signal %d (%s) received by PID %d\n" % (-one["code"], _signal_name(-one["code"]), one["pid"])
        for one in died
    )
    if text:
        Path(watch.spec["dir"], "launcher.log").write_text(text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "SIG%d" % number


def _evidence(watch: _Watch) -> Dict[str, str]:
    """Ask the ranks that are still there for their flight record and stacks; note where the kernel has them."""
    Path(watch.spec["dir"], "evidence-wanted").touch()
    pids = watch.running()
    waiting = {str(watch.ranks[pid]): processes.waiting_in(p) for pid in pids if (p := processes.read(pid))}
    wanted = [
        os.path.join(watch.spec["dir"], "rank%d.flight.json" % watch.ranks[pid])
        for pid in pids
        if watch.spec["world_size"] > 1
    ]
    end = time.monotonic() + 0.5
    while time.monotonic() < end and not all(map(os.path.exists, wanted)):
        time.sleep(POLL_S)
    for pid in pids:  # last: the signal interrupts system calls and may un-hang the rank
        found = processes.read(pid)
        if found and found.state != "T":
            processes.send(found, signal.SIGUSR1)
    time.sleep(0.1 if pids else 0)
    return waiting


def _kill(watch: _Watch, grace_s: float) -> List[processes.Process]:
    """End everything below us; the processes that even KILL did not end within `KILLED_S`."""
    tree = processes.descendants(os.getpid())
    for process in tree:
        processes.send(process, signal.SIGTERM)
        if process.state == "T":  # a stopped process handles TERM only once it continues
            processes.send(process, signal.SIGCONT)
    if tree:
        _wait_until_gone(watch, grace_s)
    end = time.monotonic() + KILLED_S
    while True:  # in rounds: a process may fork between our look and our kill
        tree = processes.descendants(os.getpid())
        if not tree or time.monotonic() > end:
            return tree
        for process in tree:
            processes.send(process, signal.SIGKILL)
        _wait_until_gone(watch, 0.2)


def _wait_until_gone(watch: _Watch, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _reap(watch)
        if not processes.descendants(os.getpid()):
            return
        time.sleep(POLL_S)
    _reap(watch)


def _remove_shared_memory(watch: _Watch) -> List[str]:
    """Delete what the tree created under /dev/shm and nobody holds now; names of what could not be deleted."""
    left = []
    for path in sorted(watch.shared_memory):
        try:
            held = os.stat(path).st_uid != os.geteuid() or os.stat(path).st_ctime < watch.spec["started"]
        except OSError:
            continue
        if not held:
            try:
                os.unlink(path)
            except OSError as error:
                left.append("shared memory %s (%s)" % (path, error.strerror))
    return left


def _vanish(watch: _Watch) -> NoReturn:
    """The supervisor is gone: nobody will read a record. End the tree, the directory and this process."""
    _kill(watch, 0.2)
    _remove_shared_memory(watch)
    shutil.rmtree(watch.spec["dir"], ignore_errors=True)
    os._exit(0)

"""Runs a capture on one node. `list` writes the jobs as JSON; `collect` writes a tar of the output of each step.

Harmless steps come first. The second sample follows after a pause: only two samples tell waiting, busy and stuck apart.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import sys
import time
from functools import partial
from typing import Any, Dict, List, Optional, Sequence

from . import node, processes, stacks, triggers
from .listing import list_jobs
from .ranks import is_python
from .stacks import Target
from .steps import MOST_BYTES, Archive, Outcome, Step, end_with_parent, end_with_reader, pause, run

PROC_S, MEMORY_S = 2.0, 3.0
MOST_WAIT_S = 10.0  # before the moment at which all nodes begin
MOST_CHILDREN = 64  # of all ranks together, whose stacks are taken
NICE = 5  # with more, busy ranks would keep the capture from finishing


def main(options: Dict[str, Any]) -> None:
    """Run the agent. It ends after `limit_s`, whatever it waits for, and when nobody reads its output any more.

    It ends with its parent only on kb's own node, since a container runtime or Slurm may start it from a short-lived
    process.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, options["limit_s"])
    if options["is_here"]:
        end_with_parent()
    end_with_reader(1)
    if options["mode"] == "list":
        sys.stdout.write(json.dumps(list_jobs(options.get("pid"), options["as_root"])))
        sys.stdout.flush()
    else:
        os.nice(NICE)
        archive = Archive(1, options.get("most_bytes", MOST_BYTES))
        Collection(options, archive).collect()
        archive.close()


class Collection:
    """One capture. `options`: the job as `list_jobs` returns it, `interval`, `seconds`, `native`, `trigger`, `as_root`.

    `py_spy` is its path on this node, `sent_py_spy` the program itself, `begin` when to begin by this node's clock.
    """

    def __init__(self, options: Dict[str, Any], archive: Archive) -> None:
        self.options, self.archive = options, archive
        self.job = options["job"]
        self.ranks: List[Dict[str, Any]] = self.job["ranks"]
        self.targets = [Target(_folder(rank), rank["pid"], rank["start"]) for rank in self.ranks]
        self.report: List[Dict[str, Any]] = []
        self.tool: Optional[str] = options.get("py_spy")
        if options.get("sent_py_spy"):
            try:
                self.tool = stacks.sent_tool(options["sent_py_spy"])
            except OSError as error:  # memory that may not be executed
                self.report.append({"step": "py-spy", "where": node.NODE, "seconds": 0.0, "error": str(error)})
        pause(min(MOST_WAIT_S, options.get("begin", 0.0) - time.time()))
        self.began = time.monotonic()
        self.deadline = self.began + options["seconds"]

    def collect(self) -> None:
        self.archive.add("node/host.json", json.dumps(self._host()))
        self._trigger()
        self._sample(1)
        first = time.monotonic()
        self._stacks(1)
        self._facts()
        self._node()
        pause(min(first + self.options["interval"], self.deadline - 2) - time.monotonic())
        self._sample(2)
        outcomes = self._stacks(2)
        self._save(run([Step("network-2", node.NODE, node.FILE_S, function=node.network)], self.deadline))
        if self.options["native"] and self.tool:
            self._save(stacks.native(self.tool, stacks.distinct(self._alive(), outcomes), self.deadline), "txt")
        self._dumps()
        self.archive.add(
            "steps.json", json.dumps({"seconds": round(time.monotonic() - self.began, 2), "steps": self.report})
        )

    def _host(self) -> Dict[str, Any]:
        return {
            "host": socket.gethostname(), "kernel": platform.release(), "time": time.time(),
            "uptime_s": time.clock_gettime(time.CLOCK_BOOTTIME), "uid": os.geteuid(),
            "python": platform.python_version(),
        }  # fmt: skip

    def _alive(self) -> List[Target]:
        """The ranks that are alive. A pid identifies a process only together with its start."""
        return [target for target in self.targets if processes.is_still(target.pid, target.start)]

    def _save(self, outcomes: Sequence[Outcome], suffix: str = "json", pids: Optional[Dict[str, int]] = None) -> None:
        for outcome in outcomes:
            step = outcome.step
            entry: Dict[str, Any] = {"step": step.name, "where": step.where, "seconds": round(outcome.seconds, 2)}
            if outcome.error:
                entry["error"] = outcome.error
            if outcome.is_left_behind:
                entry["left_behind"] = True
            if pids and outcome.error and step.where in pids:
                entry.update(stacks.explain(outcome, pids[step.where], self.options["as_root"]))
            if outcome.output and not (outcome.error and suffix == "json"):
                name = "%s/%s.%s" % (step.where, step.name.replace("/", "_").replace(" ", ""), suffix)
                if self.archive.add(name, outcome.output):
                    entry["file"] = name
                else:
                    entry["error"] = "left out: the capture of this node is as large as it may be"
            self.report.append(entry)

    def _sample(self, number: int) -> None:
        steps = [
            Step("sample-%d" % number, target.where, PROC_S, function=partial(processes.sample, target.pid))
            for target in [*self._alive(), *self._others()]
        ]
        gone = {target.where for target in self.targets} - {target.where for target in self._alive()}
        self._save(run(steps, self.deadline))
        if number == 1:
            self._save(run([Step("network-1", node.NODE, node.FILE_S, function=node.network)], self.deadline))
        for where in sorted(gone):
            self.report.append(
                {"step": "sample-%d" % number, "where": where, "seconds": 0.0, "error": "the process has ended"}
            )

    def _others(self) -> List[Target]:
        """The launcher and the child processes of the ranks."""
        others = [
            Target("%s/child-%d" % (_folder(rank), child["pid"]), child["pid"], child["start"])
            for rank in self.ranks
            for child in rank["children"]
        ][:MOST_CHILDREN]
        launcher = processes.stat(self.job["launcher"]) if self.job["launcher"] else None
        if launcher:
            others.append(Target("launcher", self.job["launcher"], launcher.start))
        return [target for target in others if processes.is_still(target.pid, target.start)]

    def _stacks(self, number: int) -> List[Outcome]:
        """Take the stacks of all processes; return those of the ranks that are alive, in order."""
        if not self.tool:
            return []
        alive = self._alive()
        targets = [*alive, *(target for target in self._others() if is_python(target.pid))]
        outcomes = stacks.take(self.tool, targets, "stack-%d" % number, self.deadline)
        self._save(outcomes, "txt", {target.where: target.pid for target in targets})
        return outcomes[: len(alive)]

    def _facts(self) -> None:
        steps = []
        for target in self._alive():
            steps.append(Step("facts", target.where, PROC_S, function=partial(processes.facts, target.pid)))
            steps.append(
                Step("memory-map", target.where, MEMORY_S, function=partial(processes.own_environment, target.pid))
            )
        outcomes = run(steps, self.deadline)
        self._save(outcomes)
        logs: Dict[str, str] = {}
        for outcome in outcomes:
            document = outcome.json() if outcome.step.name == "facts" else None
            for name in ("stdout", "stderr"):
                path = (document or {}).get(name, "")
                if path.startswith("/") and not path.startswith(("/dev/", "/proc/")) and "(deleted)" not in path:
                    logs.setdefault(path, "%s/%s" % (outcome.step.where, name))
        self.folders = sorted({os.path.dirname(path) for path in logs} | {"/dev/shm", "/tmp"})
        self.folders += [(outcome.json() or {}).get("cwd", "") for outcome in outcomes if outcome.step.name == "facts"]
        pids = {target.where: target.pid for target in self.targets}
        reads = []
        for path, place in logs.items():
            where, _, name = place.rpartition("/")
            inside = "/proc/%d/root%s" % (pids[where], path)  # as the process sees it, which may be in a container
            reads.append(Step(name, where, node.FILE_S, function=partial(node.log_end, inside)))
        self._save(run(reads, self.deadline), "log")

    def _node(self) -> None:
        pids = {target.pid for target in self.targets}
        since = min((target.start / processes.TICKS for target in self.targets), default=0.0)
        folders = [folder for folder in dict.fromkeys(self.folders) if folder.startswith("/")][:8]
        has_nccl = any(rank["has_nccl"] for rank in self.ranks) and self.options.get("is_first", True)
        for outcome in run(node.steps(pids, folders, has_nccl), self.deadline):
            text = outcome.output.decode("utf-8", "replace")
            if outcome.step.name == "sockets":
                outcome = outcome._replace(output=node.own_sockets(text, pids).encode())
            elif outcome.step.name in ("kernel", "journal"):
                outcome = outcome._replace(output=node.recent_kernel_lines(text, since).encode())
            self._save([outcome], "txt" if outcome.step.command else "json")

    def _trigger(self) -> None:
        """Find what could be triggered, and trigger it if asked to. This comes first, since answers take seconds."""
        pairs = [(rank, target) for rank, target in zip(self.ranks, self.targets) if target in self._alive()]
        found = run(
            [
                Step("windows", target.where, PROC_S,
                     function=partial(triggers.windows, target.pid, rank["rank"], rank["environment"]))
                for rank, target in pairs
            ],
            self.deadline,
        )  # fmt: skip
        steps = []
        for (rank, target), outcome in zip(pairs, found):
            rank["windows"] = outcome.json() or {}
            if self.options["trigger"]:
                steps += triggers.ask_steps(target.where, target.pid, rank["windows"], rank["environment"])
        self._save(run(steps, self.deadline))

    def _dumps(self) -> None:
        steps = []
        for rank, target in zip(self.ranks, self.targets):
            if rank["rank"] is None or not processes.is_still(target.pid, target.start):
                continue
            asked = bool(self.options["trigger"] and rank.get("windows", {}).get("pipe"))
            read = partial(triggers.read_dump, target.pid, rank["rank"], rank["environment"], asked)
            steps.append(Step("flight", target.where, triggers.DUMP_WAIT_S + triggers.READ_S, function=read))
        self._save(run(steps, self.deadline), "bin")
        self.archive.add("node/windows.json", json.dumps({_folder(rank): rank.get("windows") for rank in self.ranks}))


def _folder(rank: Dict[str, Any]) -> str:
    return "rank-%d" % rank["rank"] if rank["rank"] is not None else "pid-%d" % rank["pid"]

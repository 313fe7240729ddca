"""Runs one arm of a probe and returns how it ended. Never hangs, and leaves nothing behind.

The launcher itself only starts fork servers, sends them tasks and reads what guards and ranks wrote:

    launcher -> forkserver -> guard (one per arm) -> ranks
    (kb)        (reader's interpreter, by path)

The guard enforces the deadline; if it fails to, the launcher ends the guard's process tree from outside. Use the
launcher as a context manager, in the thread that lives longest: a fork server dies with the thread that started it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kb.errors import LaunchError
from kb.harness import arm_environment, arm_files, flight_compare, scratch
from kb.harness.forkserver_client import OUTSIDE_S, ForkClient
from kb.harness.outcome import ArmOutcome, RankOutcome, rank_outcome

MEMORY_CAP_MIB = 8192
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """What one guard runs. The launcher adds directory and identity.

    `execute` starts every rank in a fresh interpreter; `has_torch` forks the ranks from one that has imported torch.
    """

    action: str
    probe: Path
    deadline_s: float
    world_size: int = 1
    backend: str = "gloo"
    experiment: int = 0
    arm: str = ""
    params: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    settle_s: float = 0.0
    linger: bool = False
    execute: bool = False
    has_torch: bool = False
    gpus: tuple[str, ...] = ()
    gpu_memory_mib: int = 0

    def spec(self, directory: Path) -> dict[str, Any]:
        """The JSON document for the fork server."""
        return {
            "arm_id": uuid.uuid4().hex,
            "dir": str(directory),
            "started": time.time(),
            "memory_cap_bytes": MEMORY_CAP_MIB << 20,
            "action": self.action,
            "probe": str(self.probe),
            "deadline_s": self.deadline_s,
            "settle_s": self.settle_s,
            "world_size": self.world_size,
            "backend": self.backend,
            "experiment": self.experiment,
            "arm": self.arm,
            "params": {name: [kind, str(v) if isinstance(v, Path) else v] for name, (kind, v) in self.params.items()},
            "env": {"TMPDIR": str(directory)} | self._arm_env(directory) | dict(self.env),
            "linger": self.linger,
            "execute": self.execute,
            "gpu_memory_mib": self.gpu_memory_mib,
        }

    def _arm_env(self, directory: Path) -> dict[str, str]:
        return arm_environment.arm_variables(directory, self.backend, self.gpus) if self.action == "run" else {}


class Launcher:
    """Starts arms in one interpreter.

    `removed` names the variables that arms do not get. `of_caller` has their values, for checks, which judge the
    caller's environment.
    """

    def __init__(self, python: Path, keep_logs: Path | None = None) -> None:
        self.python = python
        self.keep_logs = keep_logs
        self.environment, self.removed = arm_environment.scrub_environment()
        self.of_caller = {name: os.environ[name] for name in self.removed}
        self._servers: dict[bool, ForkClient] = {}
        self._is_closed = False

    def __enter__(self) -> Self:
        scratch.sweep()
        self._servers[False] = ForkClient(self.python, self.environment, preload=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """End everything that runs. Calls that wait for an arm raise `LaunchError`; no arm can start afterwards."""
        self._is_closed = True
        for server in self._servers.values():
            server.close()

    def preload(self) -> None:
        """Start importing torch for the CPU arms, and return at once. Call it from the long-lived thread."""
        if True not in self._servers and not self._is_closed:
            self._servers[True] = ForkClient(self.python, self.environment, preload=True)

    def rank_results(self, task: Task) -> tuple[dict[str, Any] | None, ArmOutcome]:
        """Run a task of one rank. Returns the result that the rank wrote (None if it wrote none) and the outcome."""
        outcome, results = self._run(task, "")
        return results.get(0), outcome

    def run(self, task: Task, label: str) -> ArmOutcome:
        """Run an arm, up to `ATTEMPTS` times if it ends before its mechanism is reached."""
        outcome = ArmOutcome(failure="not started")
        for attempt in range(1, ATTEMPTS + 1):
            earlier = outcome.leftovers
            outcome, _ = self._run(task, f"{label}-{attempt}" if attempt > 1 else label)
            outcome = replace(outcome, attempts=attempt, leftovers=(*earlier, *outcome.leftovers))
            if outcome.has_reached or outcome.kind == "unavailable":
                break
        return outcome

    def _run(self, task: Task, label: str) -> tuple[ArmOutcome, dict[int, dict[str, Any]]]:
        warm = task.has_torch and not task.execute
        if warm:
            self.preload()
        if self._is_closed:
            raise LaunchError("the launcher has been closed", "run the command again")
        with ExitStack() as stack:
            try:
                directory = stack.enter_context(scratch.directory("kb-arm-"))
            except OSError as error:
                raise LaunchError(
                    f"cannot create a directory for the arm: {error}",
                    "free some space, or set TMPDIR to a writable disk",
                ) from error
            try:
                outcome, results = self._run_in(directory, task, self._servers[warm], label)
            except OSError as error:
                raise LaunchError(f"the arm's directory failed: {error}", "is the disk full?") from error
        if directory.exists():
            outcome = replace(outcome, leftovers=(*outcome.leftovers, f"directory {directory}"))
        return outcome, results

    def _run_in(
        self, directory: Path, task: Task, server: ForkClient, label: str
    ) -> tuple[ArmOutcome, dict[int, dict[str, Any]]]:
        spec = task.spec(directory)
        (directory / "spec.json").write_text(json.dumps(spec))
        failure = server.run(spec, task.deadline_s + task.settle_s + OUTSIDE_S)
        paths = {rank: directory / f"rank{rank}.json" for rank in range(task.world_size)}
        results = {rank: result for rank, path in paths.items() if (result := arm_files.read_object(path))}
        outcome = _read_arm(directory, task, results, failure)
        if label and self.keep_logs:
            arm_files.save(directory, self.keep_logs / label)
        return outcome, results


def _read_arm(directory: Path, task: Task, results: dict[int, dict[str, Any]], failure: str) -> ArmOutcome:
    record = arm_files.read_object(directory / "guard.json") or {}
    ending = str(record.get("ending", ""))
    if not record and not failure:
        failure = "its guard died"
    exits = {rank_exit["rank"]: rank_exit for rank_exit in record.get("exits", ())}

    def outcome_of(rank: int) -> RankOutcome:
        own_exit = None if rank in record.get("cut", ()) else exits.get(rank)
        return rank_outcome(
            rank,
            results.get(rank),
            own_exit["code"] if own_exit else None,
            ending,
            arm_files.read_log(directory / f"rank{rank}.log"),
            arm_files.read_log(directory / f"rank{rank}.stacks"),
            str(record.get("evidence", {}).get(str(rank), "")),
            own_exit["time"] if own_exit else None,
            arm_files.read_object(directory / f"rank{rank}.facts.json"),
        )

    return ArmOutcome(
        ranks=tuple(outcome_of(rank) for rank in range(task.world_size)),
        has_reached=all((directory / f"reached-{rank}").exists() for rank in range(task.world_size)),
        failure=failure,
        duration_s=float(record.get("duration_s", 0.0)),
        peak_mib=int(record.get("peak_mib", 0)),
        flight=_compare_flight_records(directory, task.world_size),
        strays=tuple(record.get("strays", ())),
        leftovers=tuple(record.get("leftovers", ())),
    )


def _compare_flight_records(directory: Path, world_size: int) -> tuple[str, ...]:
    paths = {rank: directory / f"rank{rank}.flight.json" for rank in range(world_size)}
    records = {rank: record for rank, path in paths.items() if (record := arm_files.read_objects(path))}
    try:
        return flight_compare.compare(records, world_size)
    except (KeyError, TypeError, ValueError):  # not what our worker writes; evidence is optional
        return ()

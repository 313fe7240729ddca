"""Lists the jobs of a node, and what kb needs to know about the node itself: its clock, machine and py-spy."""

from __future__ import annotations

import os
import platform
import socket
import time
from functools import partial
from typing import Any, Dict, List, Optional

from . import processes
from .jobs import group_jobs, single
from .ranks import Family, find_ranks, read_survey, survey
from .stacks import find_tool
from .steps import Step, run

SURVEY_S = 5.0
TOOL_S = 2.0  # for finding py-spy, perhaps on a file system that does not answer
MOST_BLOCKED = 3  # processes whose memory cannot be read, after which the survey ends
MOST_PROGRAMS = 16  # whose folders are searched for py-spy


def list_jobs(pid: Optional[int], as_root: str) -> Dict[str, Any]:
    """The jobs of the node, with `pid` only those of this process. `time` is the node's clock, first and last."""
    began = time.time()
    known, denied, problems, blocked = [], [], [], []  # type: ignore[var-annotated]
    deadline = time.monotonic() + SURVEY_S * (MOST_BLOCKED + 1)
    while True:
        step = Step("survey", "node", SURVEY_S, function=partial(survey, blocked, _print))
        (outcome,) = run([step], deadline)
        known, denied, stuck = read_survey(outcome.output.decode("utf-8", "replace"))
        if not outcome.error or stuck is None or len(blocked) == MOST_BLOCKED:
            break
        blocked.append(stuck)
        problems.append("process %d does not let kb read its memory: its driver may hang, and it may be a rank" % stuck)
    family = Family(known)
    jobs = group_jobs(find_ranks(family), family)
    if pid is not None:
        jobs = [job for job in jobs if _belongs(pid, job, family)]
        if not jobs and pid in family.by_pid:
            jobs = [single(family.by_pid[pid], family)]
    if denied and not jobs:
        users = sorted({document["denied"] for document in denied})
        problems.append(
            "%d processes of other users (%s) could not be inspected: %s, or run it as their user"
            % (len(denied), ", ".join(map(str, users[:5])), as_root)
        )
    return {
        "jobs": jobs,
        "problems": problems,
        "host": socket.gethostname(),
        "has_pid": pid is None or processes.stat(pid) is not None,
        "machine": "%s %s" % (platform.system(), platform.machine()),
        "py_spy": _tool(jobs, family),
        "time": [began, time.time()],
    }


def _tool(jobs: List[Dict[str, Any]], family: Family) -> str:
    """The path of py-spy, on PATH or in a rank's environment, found by its interpreter and its torch library."""
    programs: Dict[str, None] = {}
    for rank in [rank for job in jobs for rank in job["ranks"]]:
        process = family.by_pid[rank["pid"]]
        for path in (*process.arguments[:1], *process.libraries[:1]):
            prefix, library, _ = path.partition("/lib/python3")
            programs[prefix + "/bin/python3" if library else path] = None
    search = partial(find_tool, list(programs)[:MOST_PROGRAMS])
    (outcome,) = run([Step("tool", "node", TOOL_S, function=search)], time.monotonic() + TOOL_S)
    return outcome.json() or ""


def _print(text: str) -> None:
    os.write(1, text.encode())


def _belongs(pid: int, job: Dict[str, Any], family: Family) -> bool:
    """Whether the process is a rank, or an ancestor (such as the launcher) or descendant of one."""
    for rank in job["ranks"]:
        process = family.by_pid[rank["pid"]]
        if pid == process.pid or pid in {other.pid for other in (*family.above(process), *family.below(process.pid))}:
            return True
    return False

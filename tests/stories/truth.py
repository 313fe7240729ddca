"""truth.json of a job: what was expected of it, and what every rank left about itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.stories.jobs import ENDS, Job

FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
WAITED = re.compile(
    r"Timed out waiting|[Cc]onnection (?:was )?(?:closed|reset)|timed out|Broken pipe|op.preamble.length|data size|"
    r"enforce fail|Application timeout|abort|closed by|SocketException|Socket closed|readBytes|recvBytes"
)


def ranks_of(folder: Path, own_files: set[str]) -> dict[int, dict[str, Any]]:
    """What the ranks of one attempt left; `own_files`: names of the program's files, whose frames are places."""
    left = {}
    for file in sorted(folder.glob("*.json")):
        state = json.loads(file.read_text(encoding="utf-8"))
        stack = file.with_suffix(".stack")
        left[int(state["rank"])] = settled(
            state, stack.read_text(errors="replace") if stack.exists() else "", own_files
        )
    return left


def settled(state: dict[str, Any], stack: str, own_files: set[str]) -> dict[str, Any]:
    """A rank that could not note its end: the frames that it left at the signal say which end it was."""
    end, place, error = state["end"], state["place"], state["error"]
    if "Fatal Python error" in stack and end in ("running", "hung"):
        end = "exception" if "Aborted" in stack else "killed"
        error = stack.split("\n", 1)[0]
        place = innermost(stack, own_files)
    elif end == "running":
        end = "terminated"
        place = innermost(stack, own_files) or place
    elif end == "hung":
        place = innermost(stack, own_files) or place
    assert end in ENDS, end
    return {
        "end": end,
        "place": place,
        "error": error,
        "step": state["step"],
        "phase": state["phase"],
        "injected": state["injected"],
    }


def innermost(stack: str, own_files: set[str]) -> str:
    """The program's own innermost frame in the thread that runs it; most recent calls come first here."""
    best = ""
    for thread in re.split(r"\n(?=(?:Current thread|Thread) )", "\n" + stack):
        frames = [m for line in thread.splitlines() if (m := FRAME.match(line)) and Path(m["file"]).name in own_files]
        if frames and (not best or any(m["function"] == "<module>" for m in frames)):
            best = f"{frames[0]['function']}:{frames[0]['line']}"
    return best


def document(job: Job, ranks: dict[int, dict[str, Any]], code: int, libraries: dict[str, str]) -> dict[str, Any]:
    told = {
        "name": job.name,
        "half": job.half,
        "program": job.program,
        "fault": job.fault,
        "style": job.style,
        "launch": job.launch,
        "world": job.world,
        "torch": libraries.get("torch", ""),
        "libraries": {name: version for name, version in libraries.items() if name != "torch"},
        "exit": code,
        "class": job.kind,
        "culprit": None if job.kind == "healthy" else job.culprit,
        "entries": list(job.entries),
        "also": list(job.also),
        "ranks": {
            str(rank): {key: value for key, value in state.items() if key != "injected"}
            for rank, state in sorted(ranks.items())
        },
    }
    if job.also_class:
        told["also_class"] = list(job.also_class)
    return told


def doubts(job: Job, ranks: dict[int, dict[str, Any]], code: int) -> list[str]:
    """Where the job did not go the way it was meant to; empty for a record that may be kept."""
    wrong = []
    if bool(code) != job.fails:
        wrong.append(f"exit code {code}")
    present = set(range(job.world)) - {job.absent}
    if set(ranks) != present and job.kind != "never-started":
        wrong.append(f"ranks {sorted(ranks)} left a truth, not {sorted(present)}")
    injected = {rank for rank, state in ranks.items() if state["injected"]}
    if job.kind not in ("healthy", "never-started") and not injected:
        wrong.append("the fault was not injected")
    if job.culprit is not None and injected and job.culprit not in injected | {job.absent}:
        wrong.append(f"injected in {sorted(injected)}, not in {job.culprit}")
    ends = {rank: state["end"] for rank, state in ranks.items()}
    raised = {rank for rank, end in ends.items() if end == "exception"}
    waited = {rank for rank in raised if WAITED.search(ranks[rank]["error"])}
    culprit = job.culprit
    if job.kind in ("diverge", "uneven", "shape", "slow", "silent") and not waited - {culprit}:
        wrong.append("nobody waited in vain")
    if job.kind == "error" and culprit is not None and (ends.get(culprit) != "exception" or culprit in waited):
        wrong.append(f"rank {culprit} did not raise an error of its own")
    if job.kind == "error-all" and (raised != present or waited):
        wrong.append("not all ranks raised errors of their own")
    if job.kind in ("killed", "exit") and culprit is not None and ends.get(culprit) != job.kind:
        wrong.append(f"rank {culprit} ended as {ends.get(culprit)}")
    if job.kind == "silent" and culprit is not None and ends.get(culprit) not in ("hung", "exception"):
        wrong.append(f"rank {culprit} ended as {ends.get(culprit)}")
    if not job.fails and set(ends.values()) != {"done"}:
        wrong.append(f"ends {ends}")
    return wrong

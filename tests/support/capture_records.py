"""Records as `kb capture` writes them, of invented processes."""

from __future__ import annotations

import json
from typing import Any

from kb.diagnose.inputs.bundle import NODE_SCHEMA, PROCESS_SCHEMA

REDUCES = (
    "all_reduce (torch/distributed/distributed_c10d.py:3252)",
    "wrapper (torch/distributed/c10d_logger.py:83)",
    "step (train.py:14)",
)
GATHERS = ("all_gather (torch/distributed/distributed_c10d.py:4000)", "log (train.py:30)")
SLEEPS = ("prepare_eval (train.py:24)",)
LOADS = (
    "wait (multiprocessing/connection.py:947)",
    "__next__ (torch/utils/data/dataloader.py:725)",
    "step (train.py:12)",
)


def stack(*frames: str) -> str:
    """A stack as py-spy prints it; empty without frames."""
    lines = [f"    {frame}" for frame in (*frames, "<module> (train.py:90)")]
    return "\n".join(["Process 1: python train.py", 'Thread 1 (idle): "MainThread"', *lines, ""]) if frames else ""


def sample(at: float, cpu: float = 0.0, switches: int = 7, state: str = "S", **more: Any) -> dict[str, Any]:
    changing = {"uptime_s": at, "cpu_s": 10.0 + cpu, "read": 1000, "switches": [switches, 0]}
    return {**changing, "state": state, "wchan": "futex_do_wait", "tracer": 0, **more}


def record(rank: int | None, frames: tuple[str, ...] = REDUCES, **more: Any) -> dict[str, Any]:
    """The record of a rank that did not run between two samples 3 s apart, unless `more` changes that."""
    return {
        "schema": PROCESS_SCHEMA,
        "rank": rank,
        "pid": 100 + (rank or 0),
        "node": "node-0",
        "samples": [sample(0), sample(3)],
        "stacks": [stack(*frames)] * 2,
        "errors": {},
        "children": [],
        **more,
    }


def busy(frames: tuple[str, ...], cpu: float = 2.9) -> dict[str, Any]:
    return {"samples": [sample(0), sample(3, cpu, 99)], "stacks": [stack(*frames)] * 2}


def node(**more: Any) -> dict[str, Any]:
    job = {"address": "127.0.0.1:29500", "world_size": 4, "local_size": 4, **more.pop("job", {})}
    ranks = more.pop("ranks", [{"rank": rank} for rank in range(4)])
    return {"schema": NODE_SCHEMA, "node": "node-0", "job": job, "ranks": ranks, "tools": {}, "steps": [], **more}


def encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()

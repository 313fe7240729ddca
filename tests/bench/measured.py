"""One child process, measured: CPU seconds, peak memory, exit code."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """What a process took; `cpu_s` and `peak_mib` are its own, without its children."""

    cpu_s: float
    wall_s: float
    peak_mib: float
    code: int


def run(argv: list[str], cwd: Path) -> Cost:
    """Run a command to its end, with its output thrown away."""
    started = time.perf_counter()
    process = subprocess.Popen(argv, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - started, usage.ru_maxrss / 1024, process.returncode)

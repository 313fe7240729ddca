"""CPU seconds, peak memory and exit code of one child process."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """The cost of a process. `cpu_s` and `peak_mib` do not include its children."""

    cpu_s: float
    wall_s: float
    peak_mib: float
    code: int


def run(argv: list[str], cwd: Path) -> Cost:
    """Run a command to its end and discard its output."""
    started = time.perf_counter()
    process = subprocess.Popen(argv, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak_kib = 0
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        peak_kib = max(peak_kib, _high_water_kib(process.pid))
        time.sleep(0.005)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - started
    return Cost(usage.ru_utime + usage.ru_stime, wall_s, peak_kib / 1024, process.returncode)


def _high_water_kib(pid: int) -> int:
    """Peak resident memory of the process so far, without children it waited for, which ru_maxrss would count."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)

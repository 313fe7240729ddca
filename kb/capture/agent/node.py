"""Reads the state of the node: sockets, kernel, GPUs, file systems, memory, network cards. Each step has a limit."""

from __future__ import annotations

import glob
import os
import re
import shutil
import time
from functools import partial
from typing import Any, Dict, List, Sequence, Set

from .processes import read
from .steps import Step

FILE_S, TOOL_S = 3.0, 8.0  # limits
MOST_LOG = 256 << 10  # bytes from the end of a log of the job
MOST_KERNEL_LINES = 2000
NODE = "node"
KERNEL = re.compile(
    r"Xid|NVRM|nvidia|nvlink|amdgpu|oom|Out of memory|Killed process|nfs|lustre|mlx|infiniband|roce|hung_task"
    r"|blocked for more than|I/O error|segfault|Machine check|mce:|EDAC|AER:|link (is )?down|soft lockup"
    r"|hard LOCKUP|rcu_",
    re.IGNORECASE,
)
STAMP = re.compile(r"\[\s*(\d+\.\d+)\]")
GPU_FIELDS = (
    "index,uuid,pci.bus_id,utilization.gpu,clocks.sm,clocks.max.sm,power.draw,temperature.gpu,memory.used,memory.total,"
    "pstate,clocks_throttle_reasons.active,ecc.errors.uncorrected.volatile.total"
)


def steps(pids: Set[int], folders: Sequence[str], has_nccl: bool) -> List[Step]:
    """The steps for a node; `folders` are on the file systems that the job needs."""
    chosen = [
        Step("memory", NODE, FILE_S, function=memory),
        Step("locks", NODE, FILE_S, function=partial(locks, pids)),
    ]
    chosen += [Step("file-system " + folder, NODE, FILE_S, function=partial(file_system, folder)) for folder in folders]
    tools = [
        ("sockets", ("ss", "-tnpi")),
        ("kernel", ("dmesg",)),
        ("journal", ("journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-n", "20000")),
        ("gpus", ("nvidia-smi", "--query-gpu=" + GPU_FIELDS, "--format=csv")),
        ("gpu-report", ("nvidia-smi", "-q")),
    ]
    if has_nccl:
        tools.append(("ras", ("ncclras", "-v")))
    chosen += [Step(name, NODE, TOOL_S, command) for name, command in tools if shutil.which(command[0])]
    return chosen


def memory() -> Dict[str, Any]:
    document: Dict[str, Any] = {"loadavg": read("/proc/loadavg").split()[:3], "processors": os.cpu_count()}
    fields = dict(line.split(":") for line in read("/proc/meminfo").splitlines() if ":" in line)
    for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Shmem", "Dirty", "Writeback"):
        if name in fields:
            document[name] = fields[name].strip()
    for name in ("cpu", "memory", "io"):
        try:
            document["pressure_" + name] = read("/proc/pressure/" + name).splitlines()
        except OSError:
            continue
    return document


def file_system(folder: str) -> Dict[str, Any]:
    """The size and free space of a file system. Blocks if the server of a network file system does not answer."""
    status = os.statvfs(folder)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    return {"folder": folder, "bytes": total, "free": free, "inodes": status.f_files, "free_inodes": status.f_favail}


def locks(pids: Set[int]) -> List[Dict[str, Any]]:
    """Which of these processes wait for a file lock, and which process holds it."""
    holders: Dict[str, int] = {}
    waiting = []
    for line in read("/proc/locks", 1 << 20).splitlines():
        parts = line.split()
        if len(parts) > 2 and parts[1] == "->":
            if parts[5].isdigit() and int(parts[5]) in pids:
                waiting.append(
                    {"pid": int(parts[5]), "kind": parts[2], "holder": holders.get(parts[0]), "inode": parts[6]}
                )
        elif len(parts) > 4 and parts[4].lstrip("-").isdigit():
            holders[parts[0]] = int(parts[4])
    return waiting


def network() -> Dict[str, Any]:
    """Counters of network cards; two readings show which of them move."""
    found: Dict[str, Any] = {"time": time.time()}
    for pattern in (
        "/sys/class/infiniband/*/ports/*/state", "/sys/class/infiniband/*/ports/*/phys_state",
        "/sys/class/infiniband/*/ports/*/rate", "/sys/class/infiniband/*/ports/*/counters/*",
        "/sys/class/infiniband/*/ports/*/hw_counters/*", "/sys/class/net/*/operstate",
        "/sys/class/net/*/statistics/[rt]x_bytes", "/sys/class/net/*/statistics/[rt]x_errors",
        "/sys/class/net/*/statistics/[rt]x_dropped",
    ):  # fmt: skip
        for path in sorted(glob.glob(pattern))[:2000]:
            try:
                found[path[len("/sys/class/") :]] = read(path, 200).strip()
            except OSError:
                continue
    return found


def log_end(path: str) -> bytes:
    """The end of a log, from the start of a line."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - MOST_LOG))
        data = file.read(MOST_LOG)
    return data if size <= MOST_LOG else data.partition(b"\n")[2]


def own_sockets(text: str, pids: Set[int]) -> str:
    """The entries of `ss -tnpi` for these processes; other sockets of the node must not be in the bundle."""
    kept: List[str] = []
    is_own = False
    for line in text.splitlines():
        if not line.startswith((" ", "\t")):
            is_own = any(int(pid) in pids for pid in re.findall(r"pid=(\d+)", line))
        if is_own:
            kept.append(line)
    return "\n".join(kept)


def recent_kernel_lines(text: str, since_s: float) -> str:
    """Lines about hardware, memory, disks and networks since the job began, `since_s` after the machine's start."""
    kept = []
    for line in text.splitlines():
        stamp = STAMP.search(line[:60])
        if stamp and float(stamp[1]) >= since_s and KERNEL.search(line):
            kept.append(line[:1000])
    return "\n".join(kept[-MOST_KERNEL_LINES:])

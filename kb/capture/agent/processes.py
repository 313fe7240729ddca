"""Reads facts about a process from /proc. What cannot be read of another user's process is missing, with the reason.

`cmdline`, `environ` and `maps` take a lock of the process's memory, which a hanging driver may hold, so they are read
last and in a separate step.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any, Callable, Dict, List, Optional, Set

TICKS = os.sysconf("SC_CLK_TCK")
KERNEL_THREAD = 0x00200000  # PF_KTHREAD
MOST_THREADS = 256  # whose name, state and processor time are read
MOST_TEXT = 1 << 16

RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # by priority
KEPT = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|ROLE_NAME|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)|NNODES"
    r"|SLURM_(JOB_ID|STEP_ID|PROCID|NODEID|LOCALID|NTASKS|NNODES|JOB_NUM_NODES|JOB_NODELIST|RESTART_COUNT|CPUS_PER_TASK)"
    r"|OMPI_COMM_WORLD_(LOCAL_)?(RANK|SIZE)|PMIX?_(RANK|SIZE)|TORCH(ELASTIC)?_\w+|NCCL_\w+|GLOO_\w+|UCX_\w+|FI_\w+"
    r"|(CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_(LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|DEVICE_ORDER)|PYTORCH_\w+"
    r"|OMP_NUM_THREADS|MKL_NUM_THREADS|PYTHONFAULTHANDLER|PYTHONUNBUFFERED|TOKENIZERS_PARALLELISM|OMP_PROC_BIND"
)
SECRET = re.compile(r"key|token|secret|passw|pwd|cred|auth|cookie|signature|sas\b", re.IGNORECASE)
MASK = "***"
CGROUP_FILES = (
    *("memory." + name for name in ("events", "max", "current", "peak", "oom_control", "failcnt", "limit_in_bytes")),
    *("cpu.stat", "cpu.max", "pids.events"),
)
LIBRARY = re.compile(
    r"/(lib(?:torch_cpu|torch_cuda|torch_hip|nccl|rccl|cuda|cudart|mpi|ucp|fabric|ibverbs)[-.\w]*\.so[.\w]*)$"
)


def read(path: str, most: int = MOST_TEXT) -> str:
    """The text of a small file. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(most).decode("utf-8", "replace")


class Stat:
    """Fields of /proc/PID/stat, or of a thread: times in seconds, `start` in clock ticks since the machine started."""

    def __init__(self, text: str) -> None:
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        self.name = head.partition("(")[2]
        self.state, self.parent = fields[0], int(fields[1])
        self.is_kernel = bool(int(fields[6]) & KERNEL_THREAD)
        self.cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
        self.start = int(fields[19])


def stat(pid: int) -> Optional[Stat]:
    """The stat fields of a process, or None if there is no such process."""
    try:
        return Stat(read("/proc/%d/stat" % pid))
    except (OSError, ValueError, IndexError):
        return None


def is_still(pid: int, start: int) -> bool:
    """Whether the pid still belongs to the process with this start, since pids are reused."""
    now = stat(pid)
    return now is not None and now.start == start and now.state not in "ZX"


def pids() -> List[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def environment(pid: int) -> Dict[str, str]:
    """The process's initial environment variables, only those that say how the job is set up. Raises OSError."""
    pairs = (part.partition("=") for part in read("/proc/%d/environ" % pid, 1 << 20).split("\0"))
    return {name: value[:1000] for name, _, value in pairs if KEPT.fullmatch(name) and not SECRET.search(name)}


def arguments(pid: int) -> List[str]:
    """The command line, with the values of options masked whose names suggest a secret. Raises OSError."""
    words = read("/proc/%d/cmdline" % pid, 1 << 15).rstrip("\0").split("\0")[:200]
    masked = []
    hides_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hides_next and not word.startswith("-"):
            word = MASK
        elif equals and SECRET.search(name):
            word = name + "=" + MASK
        hides_next = word.startswith("-") and not equals and bool(SECRET.search(name))
        masked.append(word[:500])
    return masked


def libraries(pid: int) -> List[str]:
    """The paths of the torch and communication libraries that the process has mapped. Raises OSError."""
    found: Set[str] = set()
    with open("/proc/%d/maps" % pid, "rb") as file:
        for line in file:
            path = line.rstrip().decode("utf-8", "replace").partition("/")[2]
            if LIBRARY.search("/" + path):
                found.add("/" + path)
    return sorted(found)


def threads(pid: int) -> List[Dict[str, Any]]:
    listed = []
    for name in sorted(os.listdir("/proc/%d/task" % pid), key=int)[:MOST_THREADS]:
        folder = "/proc/%d/task/%s" % (pid, name)
        try:
            now = Stat(read(folder + "/stat"))
            listed.append(
                {"tid": int(name), "name": now.name, "state": now.state, "cpu_s": now.cpu_s, "wchan": wchan(folder)}
            )
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
    return listed


def wchan(folder: str) -> str:
    try:
        text = read(folder + "/wchan").strip()
    except OSError:
        return ""
    return "" if text == "0" else text


def sample(pid: int) -> Dict[str, Any]:
    """What changes over time: state, place in the kernel, processor time, bytes read and written, context switches."""
    now = Stat(read("/proc/%d/stat" % pid))
    document: Dict[str, Any] = {
        "time": time.time(), "uptime_s": time.clock_gettime(time.CLOCK_BOOTTIME), "state": now.state,
        "cpu_s": now.cpu_s, "wchan": wchan("/proc/%d" % pid), "missing": {},
    }  # fmt: skip
    for name in ("status", "io", "syscall", "schedstat", "stack"):
        try:
            document.update(_PARTS[name](read("/proc/%d/%s" % (pid, name))))
        except OSError as error:
            document["missing"][name] = error.strerror
    document["threads"] = threads(pid)
    return document


def _fields(text: str) -> Dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _of_status(text: str) -> Dict[str, Any]:
    """Fields of /proc/PID/status. The context switches are the main thread's: if they do not change, it did not run."""
    fields = _fields(text)
    caught = int(fields.get("SigCgt", "0"), 16)
    return {
        "uid": int(fields["Uid"].split()[0]),
        "tracer": int(fields.get("TracerPid", "0")),
        "memory_kib": {
            key: int(fields[key].split()[0]) for key in ("VmRSS", "VmSwap", "RssShmem", "VmLck") if key in fields
        },
        "switches": [int(fields.get(key + "_ctxt_switches", "0")) for key in ("voluntary", "nonvoluntary")],
        "catches_usr1": bool(caught >> 9 & 1),
        "capabilities": fields.get("CapEff", ""),
        "cpus": fields.get("Cpus_allowed_list", ""),
    }


def _of_io(text: str) -> Dict[str, Any]:
    fields = _fields(text)
    return {"read": int(fields.get("rchar", "0")), "written": int(fields.get("wchar", "0"))}


def _of_syscall(text: str) -> Dict[str, Any]:
    return {"syscall": text.split()[0] if text.split() else ""}


def _of_schedstat(text: str) -> Dict[str, Any]:
    """How long the main thread was runnable but had no processor."""
    return {"run_delay_s": int(text.split()[1]) / 1e9}


def _of_stack(text: str) -> Dict[str, Any]:
    """The kernel functions, innermost first; only root may read them."""
    return {"kernel_stack": [line.split()[-1].partition("+")[0] for line in text.splitlines()[:20]]}


_PARTS: Dict[str, Callable[[str], Dict[str, Any]]] = {
    "status": _of_status,
    "io": _of_io,
    "syscall": _of_syscall,
    "schedstat": _of_schedstat,
    "stack": _of_stack,
}


def facts(pid: int) -> Dict[str, Any]:
    """What does not change and takes no lock of the process's memory."""
    document: Dict[str, Any] = {"missing": {}}
    for name in ("limits", "cgroup", "oom_score", "oom_score_adj"):
        try:
            document[name] = read("/proc/%d/%s" % (pid, name)).strip()
        except OSError as error:
            document["missing"][name] = error.strerror
    for name, link in (
        ("cwd", "cwd"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
        ("netns", "ns/net"),
        ("executable", "exe"),
    ):
        try:
            document[name] = os.readlink("/proc/%d/%s" % (pid, link))
        except OSError as error:
            document["missing"][name] = error.strerror
    document["cgroup_files"] = cgroup_files(document.get("cgroup", ""))
    return document


def cgroup_files(membership: str) -> Dict[str, str]:
    """The counters of a process's cgroup, version 2 or the memory controller of version 1."""
    found = {}
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory") or ".." in path:
            continue
        base = "/sys/fs/cgroup" + ("/memory" if controllers else "") + path.rstrip("/")
        for name in CGROUP_FILES:
            try:
                found[name] = read(base + "/" + name, 4096).strip()
            except OSError:
                continue
    return found


def own_environment(pid: int) -> Dict[str, Any]:
    """The facts whose reading takes the lock of the process's memory."""
    return {"arguments": arguments(pid), "environment": environment(pid), "libraries": libraries(pid)}

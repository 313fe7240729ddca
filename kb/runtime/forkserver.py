"""Forks one guard per arm from a process that has already imported what the arms need.

Started by path in the reader's training interpreter (standard library, Python 3.9). Importing torch for every rank
costs four seconds per arm; forking a warm process costs a tenth of a second. With `--preload` the server imports torch;
without, it cheaply serves descriptions, checks and ranks that start a fresh interpreter. Each JSON line on standard
input starts one arm; JSON lines on standard output report `ready`, `started` and `exited`. The server never touches
CUDA, so that its forks can.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Any, Dict, List  # works on Python 3.9

from kb.runtime import guard, processes, worker

MADV_COLLAPSE = 25  # linux/mman.h; Python has no name for it
ORPHANS_S = 5.0  # a killed process that still exists after this is stuck in the kernel

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch._dynamo",  # FSDP and DDP import it lazily, which takes a second and a half per arm
)


def start(arguments: List[str]) -> None:
    """`forkserver [--preload CACHE]`: serve until standard input closes, which happens however the supervisor ends."""
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; the guards watch the supervisor themselves
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: the children of a killed guard come here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    missing = {}
    if "--preload" in arguments:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = arguments[-1]  # importing torch._dynamo creates it
        for name in PRELOAD:
            try:
                importlib.import_module(name)
            except Exception as error:  # an old torch lacks a module, a broken one raises anything
                missing[name] = "%s: %s" % (type(error).__name__, error)
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    gc.collect()
    gc.freeze()
    if "--preload" in arguments:
        _use_huge_pages(libc)
    threads = len(os.listdir("/proc/self/task"))
    _send_message({"ready": True, "python": sys.version.split()[0], "missing": missing, "threads": threads})
    _serve()


def _use_huge_pages(libc: ctypes.CDLL) -> None:
    """Collapse what the imports allocated into huge pages: for 200 MiB, a fork then copies 100 entries, not 50,000.

    Needs Linux 6.1, see madvise(2). An older kernel refuses, and memory that cannot be collapsed stays as it is.
    """
    regions = []
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, access, *others = line.split()
            if access == "rw-p" and others[3:] in ([], ["[heap]"]):
                regions.append([int(address, 16) for address in addresses.split("-")])
    for begin, end in regions:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def _serve() -> None:
    guards: Dict[int, str] = {}
    received = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.005 if guards else 60)
        if readable:
            data = os.read(0, 65536)
            if not data:
                os._exit(0)
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                spec = json.loads(line)
                guards[_fork_guard(spec)] = spec["arm_id"]
        for pid in list(guards):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                arm_id = guards.pop(pid)
                if os.WIFSIGNALED(status):
                    _end_orphans(guards)
                _send_message({"exited": arm_id, "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1})


def _end_orphans(guards: Dict[int, str]) -> None:
    """Kill what a killed guard left: all other children of this process are guards."""
    end = time.monotonic() + ORPHANS_S
    while time.monotonic() < end:
        tree = processes.descendants(os.getpid())
        roots = [process.pid for process in tree if process.parent == os.getpid() and process.pid not in guards]
        if not roots:
            return
        for root in roots:
            below = processes.descendants(root)
            for process in [*below, *(process for process in tree if process.pid == root)]:
                processes.send_signal(process, signal.SIGKILL)
            _reap(root)
        time.sleep(0.01)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _fork_guard(spec: Dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            guard.main(spec, worker.main)
        except BaseException:
            traceback.print_exc()
        finally:  # never return to the loop: two fork servers would share one pipe
            os._exit(70)
    _send_message({"started": spec["arm_id"], "pid": pid})
    return pid


def _send_message(message: Dict[str, Any]) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())

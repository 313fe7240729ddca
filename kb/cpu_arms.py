"""Helpers for jobs of CPU arms: a limit that stands in for GPU memory, one process, shared tensors, DeepSpeed, pip.

Runs in the reader's training interpreter: standard library and Python 3.9, and DeepSpeed if a job asks for it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import resource
from pathlib import Path
from typing import Any, List  # works on Python 3.9

from kb.probe import Unavailable, raised

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # from malloc.h
LONGEST_TMPDIR = 70  # bytes: 107 minus the 34 of the name below, and some to spare
OWN_MAPPING = 1 << 20  # bytes; larger blocks are mapped one by one

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
LIMITED_ADDRESS_SPACE = "the memory of a GPU; here the address space of the process is limited (RLIMIT_AS)"
HOST_OOM = raised(r"DefaultCPUAllocator: can't allocate memory")
GPU_OOM = raised(r"out of memory\. Tried to allocate")


def limit_address_space(room: int) -> None:
    """Let this process allocate `room` more bytes, then fail.

    Large blocks are mapped one by one and all threads share a heap, so that neither fragments of glibc's heap nor the
    address space that a new thread's heap reserves count.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, OWN_MAPPING)
    libc.mallopt(M_ARENA_MAX, 1)
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def without_launcher() -> None:
    """Remove the variables of kb's launcher: with them, libraries start a process group or wait for other ranks."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)


def import_deepspeed() -> Any:
    """DeepSpeed for CPU and gloo, without its compiled operators, since building one takes a minute.

    Raises `Unavailable` if it cannot be imported: on import it looks for compilers and CUDA.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    # Otherwise DeepSpeed counts the NUMA nodes, for which 0.15 needs the program numactl.
    os.environ.setdefault("LOCAL_SIZE", "1")
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
        for operator in list(deepspeed.ops.__compatible_ops__):
            deepspeed.ops.__compatible_ops__[operator] = False
    except Exception as error:
        raise Unavailable("deepspeed cannot be imported for CPU here: %s" % error) from error
    return deepspeed


def share_by_file_system() -> None:
    """Let workers share tensors by name.

    torch's manager then listens in `TMPDIR/torch-shm-dir-XXXXXX/manager.sock`. A socket's path has at most 107 bytes,
    so this raises `Unavailable` if TMPDIR is too long.
    """
    import torch

    folder = os.environ.get("TMPDIR", "/tmp")
    if len(folder) > LONGEST_TMPDIR:
        raise Unavailable("torch's strategy file_system needs a shorter TMPDIR than %s" % folder)
    torch.multiprocessing.set_sharing_strategy("file_system")


def pip_in(python: str) -> List[str]:
    """The command that runs this interpreter's pip in the environment of another interpreter.

    `pip --python` starts the same file, but from a process that has imported pip first. Raises `Unavailable` if there
    is no pip, or one older than 22.2.
    """
    pip = importlib.util.find_spec("pip")
    runner = Path(pip.origin).with_name("__pip-runner__.py") if pip and pip.origin else None
    if runner is None or not runner.exists():
        raise Unavailable("pip is missing or too old: it has no __pip-runner__.py")
    return [python, str(runner), "--isolated", "--disable-pip-version-check", "--no-input"]

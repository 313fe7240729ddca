"""Helpers for the jobs of arms on CPU: a limit that stands in for GPU memory, shared tensors, DeepSpeed, pip.

Runs in the reader's training interpreter: standard library and Python 3.9, DeepSpeed when a job asks for it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import resource
from pathlib import Path
from typing import Any, List  # Python 3.9 reads these

from kb.probe import Unavailable, raised

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of malloc.h
LONGEST_TMPDIR = 70  # bytes: 107 less the 34 of the name below, and some to spare
OWN_MAPPING = 1 << 20  # bytes: larger blocks are mapped one by one

LIMITED_ADDRESS_SPACE = "the memory of a GPU; here the address space of the process is limited (RLIMIT_AS)"
HOST_OOM = raised(r"DefaultCPUAllocator: can't allocate memory")
GPU_OOM = raised(r"out of memory\. Tried to allocate")


def limit_address_space(room: int) -> None:
    """Let this process allocate `room` more bytes, then fail. Neither the fragments of glibc's heap nor the address
    space that a new thread's heap reserves count: large blocks are mapped one by one, and all threads share a heap."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, OWN_MAPPING)
    libc.mallopt(M_ARENA_MAX, 1)
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def import_deepspeed() -> Any:
    """DeepSpeed for CPU and gloo, without its compiled operators: building one takes a minute.

    Raises `Unavailable`: while it is imported, it looks for compilers and CUDA.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
        for operator in list(deepspeed.ops.__compatible_ops__):
            deepspeed.ops.__compatible_ops__[operator] = False
    except Exception as error:
        raise Unavailable("deepspeed cannot be imported for CPU here: %s" % error) from error
    return deepspeed


def share_by_file_system() -> None:
    """Let workers share tensors by name. torch's manager then listens in `TMPDIR/torch-shm-dir-XXXXXX/manager.sock`,
    and the path of a socket has at most 107 bytes: raises `Unavailable` where the folder's is too long for that."""
    import torch

    folder = os.environ.get("TMPDIR", "/tmp")
    if len(folder) > LONGEST_TMPDIR:
        raise Unavailable("torch's strategy file_system needs a shorter TMPDIR than %s" % folder)
    torch.multiprocessing.set_sharing_strategy("file_system")


def pip_in(python: str) -> List[str]:
    """The command of this interpreter's pip, to be run in the environment of another.

    `pip --python` starts this file as well, from a process of its own that has imported pip before.
    Raises `Unavailable` where there is no pip, or one before 22.2.
    """
    pip = importlib.util.find_spec("pip")
    runner = Path(pip.origin).with_name("__pip-runner__.py") if pip and pip.origin else None
    if runner is None or not runner.exists():
        raise Unavailable("pip is missing or too old: it has no __pip-runner__.py")
    return [python, str(runner), "--isolated", "--disable-pip-version-check", "--no-input"]

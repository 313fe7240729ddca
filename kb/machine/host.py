"""The host and the resource limits as this process sees them."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kb.runtime.survey_fields import UNLIMITED, Unknown, read_text


def _id() -> str:
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:12]


def _container() -> str:
    """The most specific kind of container: a Kubernetes pod is also a docker or containerd container."""
    groups = read_text(Path("/proc/1/cgroup")) if Path("/proc/1/cgroup").exists() else ""
    signs = {
        "kubernetes": "KUBERNETES_SERVICE_HOST" in os.environ or "kubepods" in groups,
        "apptainer": "APPTAINER_CONTAINER" in os.environ or "SINGULARITY_CONTAINER" in os.environ,
        "podman": Path("/run/.containerenv").exists() or "libpod" in groups,
        "docker": Path("/.dockerenv").exists() or "docker" in groups,
        os.environ.get("container", "none"): True,  # noqa: SIM112  # systemd-nspawn, lxc and others set it
    }
    return next(name for name, is_seen in signs.items() if is_seen)


def _meminfo_mib(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", read_text(Path("/proc/meminfo")), re.MULTILINE)
    if not match:
        raise Unknown(f"/proc/meminfo has no {key}")
    return int(match.group(1)) >> 10


def _shm_mib(blocks: str) -> int:
    filesystem = os.statvfs("/dev/shm")
    return int(getattr(filesystem, blocks)) * filesystem.f_frsize >> 20


def _limit(name: str) -> dict[str, int | str]:
    """The soft and hard limit, in the units of `getrlimit`: bytes, files or processes."""
    number = getattr(resource, f"RLIMIT_{name.upper()}")
    pair = dict(zip(("soft", "hard"), resource.getrlimit(number), strict=True))
    return {kind: UNLIMITED if value == resource.RLIM_INFINITY else value for kind, value in pair.items()}


SOURCES: Mapping[str, Callable[[], Any]] = {
    "id": _id,
    "kernel": lambda: os.uname().release,
    "machine": lambda: os.uname().machine,
    "os": lambda: platform.freedesktop_os_release()["PRETTY_NAME"],
    "container": _container,
    "cpus": lambda: len(os.sched_getaffinity(0)),
    "cpus_online": os.cpu_count,
    "memory_total_mib": lambda: _meminfo_mib("MemTotal"),
    "memory_available_mib": lambda: _meminfo_mib("MemAvailable"),
    "shm_total_mib": lambda: _shm_mib("f_blocks"),
    "shm_free_mib": lambda: _shm_mib("f_bavail"),
    "ptrace_scope": lambda: int(read_text(Path("/proc/sys/kernel/yama/ptrace_scope"))),
}

LIMITS: Mapping[str, Callable[[], Any]] = {
    name: partial(_limit, name) for name in ("nofile", "memlock", "nproc", "core", "stack")
}

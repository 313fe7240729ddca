"""The resources that the cgroup of this process lets it use, in version 1 and 2 of the interface."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kb.runtime.survey_fields import UNLIMITED, Unknown, read_text

ROOT = Path("/sys/fs/cgroup")
MOUNTS = Path("/proc/self/mounts")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # version 1 writes "none" as a huge number of bytes

MEMORY_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
MEMORY_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
DROPPABLE = {1: "total_inactive_file", 2: "inactive_file"}  # lines of memory.stat


def _version() -> int:
    """The version, from the mount table: a tmpfs or directory of this name would accept limits but not enforce them."""
    kinds = dict(line.split(" ")[1:3] for line in read_text(MOUNTS).splitlines())
    if kinds.get(str(ROOT)) == "cgroup2":
        return 2
    if kinds.get(str(ROOT / "memory")) == "cgroup":
        return 1
    raise Unknown(f"no cgroup file system is mounted on {ROOT}")


def _groups(controller: str) -> list[Path]:
    """This process's cgroup and its ancestors, as far as the container shows them, since the limits of all apply."""
    base, name = (ROOT, "") if _version() == 2 else (ROOT / controller, controller)
    group = base / _path(name).lstrip("/")
    if ".." in group.parts or not group.is_dir():
        group = base
    return [group_above for group_above in (group, *group.parents) if group_above.is_relative_to(base)]


def _path(controller: str) -> str:
    """The path of this process's cgroup below the controller's mount; in version 2 the controller is ""."""
    for line in read_text(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    raise Unknown(f"{MEMBERSHIP} names no group for {controller or 'version 2'}")


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None if the file is absent, as in the root group, or sets no limit."""
    content = read_text(path) if path.exists() else "max"
    return int(content) if content.isdigit() and int(content) < NO_LIMIT else None


def _tightest_group() -> tuple[Path, int | None]:
    """The group with the smallest memory limit, and the limit in bytes; without one, this process's own group."""
    groups, name = _groups("memory"), MEMORY_LIMIT[_version()]
    limits = [(limit, group) for group in groups if (limit := _number(group / name)) is not None]
    limit, group = min(limits, default=(None, groups[0]))
    return group, limit


def _memory_limit_mib() -> int | str:
    _, limit = _tightest_group()
    return UNLIMITED if limit is None else limit >> 20


def _memory_used_mib() -> int:
    """Memory in use, without the file pages that the kernel drops before it kills a process."""
    group, _ = _tightest_group()
    used = _number(group / MEMORY_USED[_version()])
    if used is None:
        raise Unknown(f"{group} does not count memory")
    droppable = re.search(rf"^{DROPPABLE[_version()]} (\d+)", read_text(group / "memory.stat"), re.MULTILINE)
    return max(0, used - int(droppable.group(1) if droppable else 0)) >> 20


def _cpu_quota() -> float | str:
    """The CPU time of the tightest group, in CPUs."""
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return min(quotas, default=UNLIMITED, key=float)


def _quota(group: Path) -> float | None:
    if (group / "cpu.max").exists():
        quota, period = read_text(group / "cpu.max").split()
    elif (group / "cpu.cfs_quota_us").exists():
        quota, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
    else:
        return None
    return round(int(quota) / int(period), 2) if quota.isdigit() else None


SOURCES: Mapping[str, Callable[[], Any]] = {
    "version": _version,
    "memory_limit_mib": _memory_limit_mib,
    "memory_used_mib": _memory_used_mib,
    "cpu_quota": _cpu_quota,
}

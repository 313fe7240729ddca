"""What the checks of several probes read of a host: its files, ranks, CPU quota and mounts, the capability of its GPUs.

Runs in the reader's training interpreter: standard library and Python 3.9. Nothing here raises; what cannot be read is
left out, and the check says `unknown`.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import List, NamedTuple, Optional, Tuple, Union  # Python 3.9 reads these

NVIDIA_SMI_S = 0.8  # a check has a second
CONTROLLERS = ("", "cpu", "cpu,cpuacct")  # below /sys/fs/cgroup: of version 2, and of version 1 under its usual names


class CpuQuota(NamedTuple):
    """The tightest quota of this process's cgroups.

    `cores` is None where no quota is visible, `group` the folder that sets it, `stopped` in how many percent of its
    periods a group has been stopped so far.
    """

    cores: Optional[float]
    group: str
    stopped: int


class Mount(NamedTuple):
    """The type of a file system, "nfs4", and its source, "server:/home". Both are empty where they are not known."""

    kind: str
    source: str


def file_text(path: Union[str, Path]) -> str:
    """What a file says, such as one of /proc, without white space at its ends; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def ranks_here(given: Optional[int]) -> Tuple[int, str]:
    """How many ranks this host runs, and who says so; 0 where nobody does."""
    if given is not None:
        return given, "as given"
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if re.fullmatch(r"[1-9][0-9]{0,4}", os.environ.get(name, "")):
            return int(os.environ[name]), name
    return 0, ""


def cpu_quota(root: Path = Path("/")) -> CpuQuota:
    """Of this process's cgroup and those above it that are visible here. `root` is where proc and sys are."""
    groups = _cpu_groups(root)
    quotas = [(cores, str(group)) for group in groups for cores in _cores(group)]
    cores, group = min(quotas) if quotas else (None, "")
    return CpuQuota(cores, group, max([0, *(share for group in groups for share in _stopped(group))]))


def _cpu_groups(root: Path) -> List[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return []
    groups: List[Path] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for base in (root / "sys/fs/cgroup" / name for name in CONTROLLERS):
            group = base / path.lstrip("/")
            groups += [above for above in (group, *group.parents) if base == above or base in above.parents]
    return groups


def _cores(group: Path) -> List[float]:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return [int(quota) / int(period)] if quota.isdecimal() and int(period) > 0 else []
    except (OSError, ValueError):
        return []


def _stopped(group: Path) -> List[int]:
    try:
        stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return [100 * int(stat["nr_throttled"]) // max(1, int(stat["nr_periods"]))]
    except (OSError, ValueError, KeyError):
        return []


def mount_of(path: str, root: Path = Path("/")) -> Mount:
    """Where a path lies, as the kernel lists mounts: the longest point above it, the last of several there."""
    longest, found = "", Mount("", "")
    try:
        real = os.path.realpath(path).rstrip("/") + "/"
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return found
    for before, _, after in (line.partition(" - ") for line in lines):  # proc_pid_mountinfo(5)
        left, right = before.split(), after.split()
        point = left[4].replace("\\040", " ").rstrip("/") + "/" if len(left) > 4 and len(right) > 1 else ""
        if point and real.startswith(point) and len(point) >= len(longest):
            longest, found = point, Mount(right[0], right[1])
    return found


def compute_capabilities(given: str = "") -> List[Tuple[int, int]]:
    """Of the GPUs that nvidia-smi lists, or of a text such as "8.0, 7.5": each once, lowest first.

    Empty where a single one cannot be read: half of a list would be taken for all of it.
    """
    if not given:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=NVIDIA_SMI_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return []
        given = ran.stdout
    found = [re.fullmatch(r"(\d{1,2})\.(\d)", word) for word in re.split(r"[\s,]+", given.strip())]
    return sorted({(int(each[1]), int(each[2])) for each in found if each}) if all(found) else []

"""What the checks of several probes read from a host: files, ranks, CPU quota, mounts, folders, GPU capabilities.

Runs in the reader's training interpreter: standard library and Python 3.9 only. Nothing here raises; what cannot be
read is left out, and the check says `unknown`.
"""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple, Union  # works on Python 3.9

from kb.packages import release

TRITON_HOME_SINCE = (3, 2)
NVIDIA_SMI_S = 0.8  # a check has one second
CONTROLLERS = ("", "cpu", "cpu,cpuacct")  # below /sys/fs/cgroup: version 2, then version 1 under its usual names


class CpuQuota(NamedTuple):
    """The tightest CPU quota of this process's cgroups.

    `cores` is None if no quota is visible. `group` is the folder that sets the quota. `stopped` is the percentage of
    periods in which a group has been throttled so far.
    """

    cores: Optional[float]
    group: str
    stopped: int


class Mount(NamedTuple):
    """The type of a file system ("nfs4") and its source ("server:/home"), both "" if unknown."""

    kind: str
    source: str


def file_text(path: Union[str, Path]) -> str:
    """The text of a file, such as one in /proc, without surrounding white space; "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def ranks_here(given: Optional[int]) -> Tuple[int, str]:
    """The number of ranks that this host runs, and where it is from; 0 if unknown."""
    if given is not None:
        return given, "as given"
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if re.fullmatch(r"[1-9][0-9]{0,4}", os.environ.get(name, "")):
            return int(os.environ[name]), name
    return 0, ""


def cpu_quota(root: Path = Path("/")) -> CpuQuota:
    """The quota of this process's cgroup and of those above it, as far as visible. `root` contains proc and sys."""
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
    """The mount that contains a path: the last one at the longest mount point above the path."""
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


def nearest(path: str) -> str:
    """The path, or the nearest folder above that exists. A link to nothing is in the way, so it counts as existing."""
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


def is_writable(path: str) -> bool:
    """Whether this process may write to a folder, or create it in the nearest one above."""
    folder = nearest(path)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def is_noexec(path: str) -> bool:
    """Whether the mount of a folder forbids execution; a folder yet to be made will be on its parent's mount."""
    try:
        return bool(os.statvfs(nearest(path)).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def compiler_caches() -> Dict[str, str]:
    """Where Triton and the inductor store the libraries that they build and load, by the variable that moves them.

    Triton reads TRITON_HOME since 3.2 (`triton/knobs.py`, before `triton/runtime/cache.py`).
    """
    environ = os.environ.get
    home = (release("triton")[:2] >= TRITON_HOME_SINCE and environ("TRITON_HOME")) or os.path.expanduser("~")
    inductor = os.path.join(tempfile.gettempdir(), "torchinductor_" + (user_name() or "uid_%d" % os.getuid()))
    return {
        "TRITON_CACHE_DIR": environ("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"),
        "TORCHINDUCTOR_CACHE_DIR": environ("TORCHINDUCTOR_CACHE_DIR") or inductor,
    }


def user_name() -> str:
    """The name that getpass finds; "" if the user has no account and no variable names it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return ""


def compute_capabilities(given: str = "") -> List[Tuple[int, int]]:
    """The compute capabilities of the GPUs that nvidia-smi lists, or of a text ("8.0, 7.5"): unique, lowest first.

    Empty if any of them cannot be read, since half of a list would be taken for all of it.
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

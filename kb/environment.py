"""A snapshot of the machine and of the reader's training interpreter, for `kb env` and for every report.

It is taken of machines on which something is broken, so nothing is assumed to work: a value that cannot be
had is None, and `reasons` says why, under the value's dotted path. A reason beside a value says what is
missing from it. Torch, the driver and the packages are asked in child processes with a deadline only.
What identifies a person or a host stays out: the host's name is hashed, addresses are counted, secrets cut.
"""

from __future__ import annotations

import csv
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import pwd
import re
import resource
import signal
import socket
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from kb.commands import Command, Ran, run
from kb.survey import Reader, Unknown

SURVEY = Path(__file__).with_name("survey.py")
SURVEY_S = {False: 15.0, True: 60.0}  # with and without importing torch, from a cold network disk
SMI = ("nvidia-smi",)
SMI_S = 10.0  # without persistence mode the driver first wakes every GPU, about a second each
FILE_BYTES = 16_384  # kept of a configuration file

CUDA_VERSION = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)")  # UMD since driver 610
TERMINAL = re.compile(r"\x1b\[[\d;]*m")  # nvidia-smi underlines the heading of its topology

CGROUP = Path("/sys/fs/cgroup")
CGROUP1_MAGIC, CGROUP2_MAGIC = 0x27E0EB, 0x63677270
UNLIMITED = "unlimited"
NO_LIMIT = 1 << 60  # cgroup v1 writes "none" as a huge number of bytes

VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "TORCHELASTIC_", "CUDA_", "NVIDIA_", "GLOO_", "OMP_")
SECRET_NAME = re.compile("TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
SECRET_VALUE = re.compile(r"://[^/\s]*@")  # a URL with a user in it
REDACTED = "(redacted)"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi lists it. `utilization_percent` is None in MIG mode, sizes on unified memory."""

    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    driver_version: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    memory_free_mib: int | None = None
    utilization_percent: int | None = None
    compute_mode: str | None = None
    pci_bus_id: str | None = None
    mig_mode: str | None = None
    ecc_uncorrected: int | None = None


GPU_QUERY = {
    "memory_total_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "memory_free_mib": "memory.free",
    "utilization_percent": "utilization.gpu",
    "pci_bus_id": "pci.bus_id",
    "mig_mode": "mig.mode.current",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """The snapshot. `interpreter` is the one that was asked; `python` is None when it did not answer."""

    interpreter: Path
    host: Mapping[str, Any] = field(default_factory=dict)
    cgroup: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    driver: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    nccl_files: Mapping[str, Any] = field(default_factory=dict)
    python: Mapping[str, Any] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable_memory_mib(self) -> int | None:
        """What a new process can take: of the machine, or of the cgroup where that is less."""
        free = self.host.get("memory_available_mib")
        limit, used = self.cgroup.get("memory_limit_mib"), self.cgroup.get("memory_used_mib")
        if isinstance(free, int) and isinstance(limit, int) and isinstance(used, int):
            return min(free, max(0, limit - used))
        return free if isinstance(free, int) else None

    def to_json(self) -> dict[str, Any]:
        gpus = None if self.gpus is None else [asdict(gpu) for gpu in self.gpus]
        return {**asdict(self), "interpreter": str(self.interpreter), "gpus": gpus}


def capture(python: Path, *, import_torch: bool = False) -> Environment:
    """Take the snapshot. Never raises for what is broken, and never waits beyond the deadlines above."""
    reader = Reader()
    with Command(_survey(python, import_torch), SURVEY_S[import_torch]) as survey:
        gpus, driver = _nvidia(reader)
        return Environment(
            interpreter=python,
            host=reader.values("host", HOST),
            cgroup=reader.values("cgroup", CGROUP_SOURCES),
            limits=reader.values("limits", LIMITS),
            network=reader.values("network", {"nics": _nics, "infiniband": lambda: _infiniband(reader)}),
            driver=driver,
            gpus=gpus,
            variables=_variables(),
            nccl_files=_nccl_files(reader),
            python=reader.value("python", lambda: _python(reader, python, survey.result(), import_torch)),
            reasons=reader.reasons,
        )


# The training interpreter


def _survey(python: Path, import_torch: bool) -> list[str]:
    return [str(python), "-B", str(SURVEY), *(["--import-torch"] if import_torch else [])]


def _python(reader: Reader, python: Path, ran: Ran, import_torch: bool) -> dict[str, Any]:
    """The survey's document; without the import when that took the whole survey down with it."""
    ending = _ending(ran)
    if ending and import_torch:
        found = _python(reader, python, run(_survey(python, False), SURVEY_S[False]), False)
        reader.reasons["python.torch_import"] = f"importing torch: {ending}"
        return found
    if ending:
        raise Unknown(ending)
    try:
        document: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])  # a sitecustomize may print before it
        reasons: dict[str, str] = document.pop("reasons")
    except (ValueError, LookupError):
        raise Unknown(f"{python} answered something else: {ran.stdout[:200]!r}") from None
    reader.reasons.update({f"python.{path}": reason for path, reason in reasons.items()})
    return document


def _ending(ran: Ran) -> str:
    """How a survey ended without an answer, and where it was: it dumps its stack when it is ended."""
    if ran.exit_code == 0:
        return ""
    stack = re.search(r"^ +(File .+)$", ran.stderr, re.MULTILINE)
    if ran.failure:
        return f"{ran.failure}; it was at {stack.group(1)}" if stack else ran.failure
    if ran.exit_code and ran.exit_code < 0:
        return f"died of {signal.Signals(-ran.exit_code).name}"
    return f"exit code {ran.exit_code}: {_last_line(ran.stderr)}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


# GPUs and their driver


def _nvidia(reader: Reader) -> tuple[tuple[Gpu, ...] | None, dict[str, Any]]:
    """The GPUs, and what concerns all of them."""
    ran, names = _ask_for_gpus()
    gpus = reader.value("gpus", lambda: _gpus(reader, ran, names))
    version = topology = ran
    if not ran.failure:  # else the driver would keep these two waiting as well
        with Command([*SMI, "--version"], SMI_S) as first, Command([*SMI, "topo", "-m"], SMI_S) as second:
            version, topology = first.result(), second.result()
    sources: dict[str, Callable[[], Any]] = {
        "kernel_module": _kernel_module,
        "gpus_on_bus": _gpus_on_bus,
        "cuda_version": lambda: _cuda_version(version),
        "topology": lambda: TERMINAL.sub("", _said(topology)).strip(),
    }
    return gpus, reader.values("driver", sources)


def _ask_for_gpus() -> tuple[Ran, list[str]]:
    """A line of values per GPU, and what they are: an old driver refuses a field that it does not know."""
    names = [one.name for one in fields(Gpu)]
    while True:
        queried = [GPU_QUERY.get(name, name) for name in names]
        ran = run([*SMI, f"--query-gpu={','.join(queried)}", "--format=csv,noheader,nounits"], SMI_S)
        refused = re.search(r'Field "(.+?)" is not a valid field', ran.stdout + ran.stderr)
        if not refused or refused.group(1) not in queried:
            return ran, names
        del names[queried.index(refused.group(1))]


def _gpus(reader: Reader, ran: Ran, names: list[str]) -> tuple[Gpu, ...]:
    """Other lines are messages: one GPU may be lost while nvidia-smi lists the others."""
    if ran.failure:
        raise Unknown(ran.failure)
    lines = {line: next(csv.reader([line], skipinitialspace=True), []) for line in ran.stdout.splitlines()}
    rows = [dict(zip(names, cells, strict=True)) for cells in lines.values() if len(cells) == len(names)]
    messages = "\n".join(line for line, cells in lines.items() if cells and len(cells) != len(names))
    if not rows:
        raise Unknown(_complaint(ran, messages))
    if ran.exit_code or messages:
        reader.reasons["gpus"] = _complaint(ran, messages)
    return tuple(_gpu(reader, number, row) for number, row in enumerate(rows))


def _gpu(reader: Reader, number: int, row: Mapping[str, str]) -> Gpu:
    sources = {one.name: partial(_cell, row.get(one.name), str(one.type)) for one in fields(Gpu)}
    return Gpu(**reader.values(f"gpus.{number}", sources))


def _cell(said: str | None, annotation: str) -> int | str:
    is_number = annotation.startswith("int")
    if said is None:
        raise Unknown("this nvidia-smi does not know the field")
    if not said or said == "N/A" or said.startswith("[") or (is_number and not said.isdigit()):
        raise Unknown(f"nvidia-smi says {said!r}")
    return int(said) if is_number else said


def _said(ran: Ran) -> str:
    """What a command printed, if it succeeded. Errors of nvidia-smi are on standard output, too."""
    if ran.failure or ran.exit_code:
        raise Unknown(ran.failure or _complaint(ran, ran.stdout))
    return ran.stdout


def _complaint(ran: Ran, messages: str) -> str:
    lines = (messages.strip() or ran.stderr.strip() or "no message").splitlines()
    return f"nvidia-smi (exit code {ran.exit_code}): {lines[0]}"


def _cuda_version(version: Ran) -> str:
    """The newest CUDA that the driver can run. Drivers before 525 know no `--version`; all print a heading."""
    if version.failure:
        raise Unknown(version.failure)
    found = CUDA_VERSION.search(version.stdout) or CUDA_VERSION.search(_said(run(SMI, SMI_S)))
    if not found:
        raise Unknown("nvidia-smi does not say")
    return str(found.group(1))


def _kernel_module() -> str:
    """Version of the loaded kernel module: readable even when nvidia-smi hangs or does not fit it."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        raise Unknown("the NVIDIA kernel module is not loaded")
    found = re.search(r"Module.*?\s(\d+\.\d[\d.]*)\s", path.read_text())
    if not found:
        raise Unknown(f"{path} does not say")
    return found.group(1)


def _gpus_on_bus() -> int:
    """NVIDIA display controllers that PCI shows: more than nvidia-smi lists means that the driver lost one."""
    devices = [device for device in Path("/sys/bus/pci/devices").iterdir() if _text(device / "vendor") == "0x10de"]
    return sum(_text(device / "class").startswith("0x03") for device in devices)


# The host


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip()


def _host_id() -> str:
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:12]


def _container() -> str:
    """What we run in, innermost word first; a pod is also a docker or containerd container."""
    groups = _text(Path("/proc/1/cgroup")) if Path("/proc/1/cgroup").exists() else ""
    signs = {
        "kubernetes": "KUBERNETES_SERVICE_HOST" in os.environ or "kubepods" in groups,
        "apptainer": "APPTAINER_CONTAINER" in os.environ or "SINGULARITY_CONTAINER" in os.environ,
        "podman": Path("/run/.containerenv").exists() or "libpod" in groups,
        "docker": Path("/.dockerenv").exists() or "docker" in groups,
        os.environ.get("container", "none"): True,  # noqa: SIM112  # systemd-nspawn, lxc and others say it themselves
    }
    return next(name for name, is_seen in signs.items() if is_seen)


def _meminfo_mib(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    if not found:
        raise Unknown(f"/proc/meminfo has no {key}")
    return int(found.group(1)) >> 10


def _shm_mib(blocks: str) -> int:
    seen = os.statvfs("/dev/shm")
    return int(getattr(seen, blocks)) * seen.f_frsize >> 20


HOST: Mapping[str, Callable[[], Any]] = {
    "id": _host_id,
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
    "ptrace_scope": lambda: int(_text(Path("/proc/sys/kernel/yama/ptrace_scope"))),
}


def _limit(name: str) -> dict[str, int | str]:
    """Soft and hard limit as `getrlimit` counts them: bytes, files, processes."""
    number = getattr(resource, f"RLIMIT_{name.upper()}")
    pair = dict(zip(("soft", "hard"), resource.getrlimit(number), strict=True))
    return {kind: UNLIMITED if value == resource.RLIM_INFINITY else value for kind, value in pair.items()}


LIMITS: Mapping[str, Callable[[], Any]] = {
    name: partial(_limit, name) for name in ("nofile", "memlock", "nproc", "core", "stack")
}


# The cgroup


def _cgroup_version() -> int:
    """Told by the type of the file system: a tmpfs of this name takes limits and enforces none."""
    kinds = {directory: _file_system(directory) for directory in (CGROUP, CGROUP / "memory")}
    if kinds[CGROUP] == CGROUP2_MAGIC:
        return 2
    if kinds[CGROUP / "memory"] == CGROUP1_MAGIC:
        return 1
    raise Unknown(f"{CGROUP} is no cgroup file system (its type is {kinds[CGROUP]:#x})")


def _file_system(directory: Path) -> int:
    """`f_type` of statfs(2), its first field; 0 when there is no such directory."""
    answer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None).statfs(os.fsencode(directory), answer):
        return 0
    return int(ctypes.c_long.from_buffer(answer).value) & 0xFFFFFFFF


def _groups(controller: str) -> list[Path]:
    """Our cgroup and those above it, as far as this container shows them: a limit of any of them holds."""
    version = _cgroup_version()
    base = CGROUP if version == 2 else CGROUP / controller
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if (controllers == "") if version == 2 else (controller in controllers.split(",")):
            group = base / path.lstrip("/")
            inside = ".." not in group.parts and group.is_dir()
            return [group, *(one for one in group.parents if one.is_relative_to(base))] if inside else [base]
    raise Unknown(f"/proc/self/cgroup names no group for {controller}")


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None when it is absent, as in the root group, or says that there is no limit."""
    said = _text(path) if path.exists() else "max"
    return int(said) if said.isdigit() and int(said) < NO_LIMIT else None


def _tightest_group() -> tuple[Path, int | None]:
    """The group with the smallest memory limit, in bytes; our own when there is no limit."""
    groups = _groups("memory")
    name = "memory.max" if _cgroup_version() == 2 else "memory.limit_in_bytes"
    limits = [(limit, group) for group in groups if (limit := _number(group / name)) is not None]
    limit, group = min(limits, default=(None, groups[0]))
    return group, limit


def _memory_limit_mib() -> int | str:
    _, limit = _tightest_group()
    return UNLIMITED if limit is None else limit >> 20


def _memory_used_mib() -> int:
    """Without the file pages that the kernel drops before it kills anybody."""
    group, _ = _tightest_group()
    is_second = _cgroup_version() == 2
    used = _number(group / ("memory.current" if is_second else "memory.usage_in_bytes"))
    if used is None:
        raise Unknown(f"{group} does not count memory")
    key = "inactive_file" if is_second else "total_inactive_file"
    droppable = re.search(rf"^{key} (\d+)", _text(group / "memory.stat"), re.MULTILINE)
    return max(0, used - int(droppable.group(1) if droppable else 0)) >> 20


def _cpu_quota() -> float | str:
    """How many CPUs' worth of time the tightest group gets."""
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return min(quotas, default=UNLIMITED, key=float)


def _quota(group: Path) -> float | None:
    if (group / "cpu.max").exists():
        quota, period = _text(group / "cpu.max").split()
    elif (group / "cpu.cfs_quota_us").exists():
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    else:
        return None
    return round(int(quota) / int(period), 2) if quota.isdigit() else None


CGROUP_SOURCES: Mapping[str, Callable[[], Any]] = {
    "version": _cgroup_version,
    "memory_limit_mib": _memory_limit_mib,
    "memory_used_mib": _memory_used_mib,
    "cpu_quota": _cpu_quota,
}


# The network


def _nics() -> dict[str, dict[str, Any]]:
    """State, MTU and number of addresses of each interface; never an address."""
    fourth, sixth = _ipv4_addresses(), _ipv6_addresses()
    return {
        nic.name: {
            "state": _text(nic / "operstate"),
            "mtu": int(_text(nic / "mtu")),
            "ipv4_addresses": fourth[nic.name],
            "ipv6_addresses": sixth[nic.name],
        }
        for nic in sorted(Path("/sys/class/net").iterdir())
        if nic.is_dir()  # bonding puts a file there
    }


def _ipv4_addresses() -> Counter[str]:
    """How many each interface has, by SIOCGIFCONF: one `struct ifreq` of 40 bytes for each address."""
    answer = array("B", bytes(40 * 1024))
    request = struct.pack("iL", len(answer), answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        (size,) = struct.unpack_from("i", fcntl.ioctl(asked, 0x8912, request))
    names = (answer[start : start + 16].tobytes().partition(b"\0")[0] for start in range(0, size, 40))
    return Counter(name.decode(errors="replace").partition(":")[0] for name in names)


def _ipv6_addresses() -> Counter[str]:
    path = Path("/proc/net/if_inet6")  # absent where IPv6 is switched off
    return Counter(line.split()[-1] for line in _text(path).splitlines()) if path.exists() else Counter()


def _infiniband(reader: Reader) -> dict[str, dict[str, Any]]:
    """Every port of every RDMA device, RoCE too (`link_layer` Ethernet); empty when no RDMA driver is loaded."""
    found = {}
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        name = f"{port.parts[-3]}/{port.name}"
        sources = {key: partial(_text, port / key) for key in ("state", "phys_state", "link_layer", "rate")}
        found[name] = reader.values(f"network.infiniband.{name}", sources)
    return found


# What NCCL, torch and OpenMP are told


def _variables() -> dict[str, str]:
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {name: _without_secret(name, value) for name, value in chosen.items()}


def _without_secret(name: str, value: str) -> str:
    return REDACTED if SECRET_NAME.search(name) or SECRET_VALUE.search(value) else value


def _nccl_files(reader: Reader) -> dict[str, Any]:
    """The files that NCCL reads: its own home directory is that of the user database, not `HOME`."""
    sources: dict[str, Callable[[], Any]] = {
        "/etc/nccl.conf": lambda: _configuration(Path("/etc/nccl.conf")),
        "~/.nccl.conf": lambda: _configuration(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf"),
    }
    if given := os.environ.get("NCCL_CONF_FILE"):
        del sources["~/.nccl.conf"]
        sources[given] = lambda: _configuration(Path(given))
    return reader.values("nccl_files", sources)


def _configuration(path: Path) -> str:
    with path.open(errors="replace") as file:
        lines = file.read(FILE_BYTES).splitlines()
    return "\n".join(_without_secret_line(line) for line in lines)


def _without_secret_line(line: str) -> str:
    name, equals, value = line.partition("=")
    return f"{name}={_without_secret(name, value)}" if equals else line

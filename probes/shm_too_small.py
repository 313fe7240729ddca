"""Makes the shared memory segments of NCCL, in a /dev/shm of Docker's default size and in a larger one."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.namespaces import own_user, tmpfs_over
from kb.nccl import nccl_release, nccl_setting
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    Unavailable,
    clear,
    completed,
    exposed,
    killed,
    raised,
    symptom,
    unknown,
)

SEGMENT = 9637888  # bytes of the buffers of one connection, as NCCL's messages name them
DOCKERS_MIB, ENOUGH_MIB = 64, 1024
QUEUE_MIB = 33  # for the proxy of one rank in each communicator that uses the network, since NCCL 2.28
CUMEM_HOST = (2, 24)  # the first release that prefers pinned memory of CUDA to files in /dev/shm
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE


def connect(ctx: Context, *, shm_mib: int) -> None:
    """Reserves one segment for each connection of two rings over the GPUs with fallocate, as NCCL does since 2.19."""
    own_dev_shm(shm_mib)
    ctx.reached()
    segments = 2 * ctx.params["gpus"]
    reserve(segments, shm_mib)
    ctx.note(segments=segments, used_mib=segments * SEGMENT >> 20)


def reserve(segments: int, shm_mib: int) -> None:
    for number in range(segments):
        handle, path = tempfile.mkstemp(prefix="nccl-", dir="/dev/shm")
        try:
            os.posix_fallocate(handle, 0, SEGMENT)
        except OSError as error:
            space = f"/dev/shm of {shm_mib} MiB, {number} of {segments} segments made"
            raise Symptom(
                f"cannot extend {path} to {SEGMENT} bytes: {error.strerror} ({error.errno}); {space}"
            ) from error


def connect_unreserved(ctx: Context, *, shm_mib: int) -> None:
    """Makes a segment with ftruncate, as NCCL 2.12 to 2.18 do: it reserves nothing, so a write finds no page."""
    import mmap

    own_dev_shm(shm_mib)
    handle, _ = tempfile.mkstemp(prefix="nccl-", dir="/dev/shm")
    os.ftruncate(handle, SEGMENT)
    with mmap.mmap(handle, SEGMENT) as segment:
        ctx.reached()
        for page in range(0, SEGMENT, 4096):
            segment[page] = 1
        ctx.note(pages_written=SEGMENT // 4096)


def connect_pinned(ctx: Context, *, shm_mib: int) -> None:
    """NCCL 2.16 to 2.18 write after the buffers, then CUDA pins all pages. Here madvise asks the kernel for them."""
    import errno
    import mmap

    own_dev_shm(shm_mib)
    handle, path = tempfile.mkstemp(prefix="nccl-", dir="/dev/shm")
    os.ftruncate(handle, SEGMENT)
    with mmap.mmap(handle, SEGMENT) as segment:
        segment[SEGMENT - 1] = 1
        ctx.reached()
        try:
            segment.madvise(POPULATE_WRITE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise Unavailable("this kernel is older than 5.14 and lacks MADV_POPULATE_WRITE") from error
            space = f"/dev/shm of {shm_mib} MiB"
            raise Symptom(f"cannot pin the pages of {path}: {error.strerror} ({error.errno}); {space}") from error


def connect_beside_leftovers(ctx: Context, *, removed: bool) -> None:
    """A job on two GPUs starts after a killed job that left the segments of four connections behind."""
    own_dev_shm(DOCKERS_MIB)
    for number in range(4):
        with Path(f"/dev/shm/nccl-left{number}").open("wb") as left:
            os.posix_fallocate(left.fileno(), 0, SEGMENT)
    ctx.reached()
    if removed:
        for path in Path("/dev/shm").glob("nccl-*"):
            path.unlink()
    reserve(4, DOCKERS_MIB)


def connect_beside_holder(ctx: Context, *, ended: bool) -> None:
    """A process of an earlier job still maps deleted segments: `ls` shows no file, but the space is taken."""
    own_dev_shm(DOCKERS_MIB)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(4 * SEGMENT)], stdout=subprocess.PIPE)
    assert holder.stdout and holder.stdout.readline() and not list(Path("/dev/shm").iterdir())
    ctx.reached()
    try:
        if ended:
            search = "grep -l '/dev/shm/.*(deleted)' /proc/[0-9]*/maps"
            result = subprocess.run(search, shell=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            assert f"/proc/{holder.pid}/maps" in result.stdout.split(), result.stdout
            end(holder)
        reserve(4, DOCKERS_MIB)
    finally:
        end(holder)


def end(process: Any) -> None:
    process.kill()
    process.wait()


HOLDER = """
import mmap, os, sys, tempfile, time
handle, path = tempfile.mkstemp(prefix="nccl-", dir="/dev/shm")
os.posix_fallocate(handle, 0, int(sys.argv[1]))
segment = mmap.mmap(handle, int(sys.argv[1]))
os.unlink(path)
print("held", flush=True)
time.sleep(60)
"""


def connect_after_remount(ctx: Context, *, remounted: bool) -> None:
    """Gives the same /dev/shm a larger size, inside a running container."""
    own_dev_shm(DOCKERS_MIB)
    ctx.reached()
    if remounted:
        command = ["mount", "-o", "remount,size=8g", "/dev/shm"]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if result.returncode:
            raise Unavailable(f"this machine does not allow a remount: {result.stderr.strip()}")
    reserve(2 * ctx.params["gpus"], DOCKERS_MIB)


def all_reduce(ctx: Context, *, shm_mib: int) -> None:
    """NCCL between two GPUs of this process, over shared memory of the host."""
    own_dev_shm(shm_mib)
    import torch

    ctx.reached()
    tensors = [torch.full((1 << 20,), float(gpu + 1), device=f"cuda:{gpu}") for gpu in range(2)]
    torch.cuda.nccl.all_reduce(tensors)
    assert all((tensor == 3).all().item() for tensor in tensors)


def own_dev_shm(mib: int) -> None:
    own_user()
    tmpfs_over("/dev/shm", mib)


# --- the check: how large is /dev/shm, and does NCCL need it between these GPUs? --------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    try:
        result = os.statvfs("/dev/shm")
    except OSError as error:
        return unknown(f"/dev/shm: {error.strerror}")
    total, free = result.f_blocks * result.f_frsize >> 20, result.f_bavail * result.f_frsize >> 20
    evidence = [f"/dev/shm: {total} MiB, {free} MiB free"]
    stale = sorted(Path("/dev/shm").glob("nccl-*"))
    if stale:
        evidence.append(f"it contains {len(stale)} files nccl-*, from running jobs or left behind by killed ones")
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    needed = 2 * gpus * SEGMENT >> 20
    advice = "use docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    if gpus < 2:
        return unknown(*evidence, f"kb sees {gpus} NVIDIA GPUs, and NCCL shares memory only between two or more")
    evidence.append(f"{gpus} GPUs: about {needed} MiB if they communicate through shared memory (2 segments each)")
    pairs = (gpus - 1) * needed + gpus * QUEUE_MIB  # all-to-all connects every GPU with every other
    if free >= max(ENOUGH_MIB, 4 * pairs):
        enough = f"this is enough for multiple communicators, even with all-to-all ({pairs} MiB each)"
        return clear(*evidence, f"{enough}; kb did not count what DataLoader workers use")
    distances = gpu_distances()
    direct = distances and all(link.startswith("NV") or link in ("PIX", "PXB") for link in distances)
    if direct and free > SEGMENT >> 20:
        one_node = "all GPUs are linked by NVLink or PCIe switches: if P2P works, a job on one node needs little"
        more_nodes = f"a job on multiple nodes needs {gpus * QUEUE_MIB} MiB for the queues of each process group"
        return unknown(*evidence, one_node, more_nodes, advice=advice)
    if free < needed and not distances and free > SEGMENT >> 20:
        why = "nvidia-smi does not show how the GPUs are linked, so kb cannot tell whether they use shared memory"
        return unknown(*evidence, why, advice=advice)
    if free < needed and (why := may_avoid_files()):
        return unknown(*evidence, why, advice=advice)
    if free < needed:
        return exposed(*evidence, advice=advice)
    enough = f"enough for the rings of one communicator; all-to-all needs {pairs} MiB, and each further group more"
    return unknown(*evidence, enough, advice=advice)


def may_avoid_files() -> str:
    """Why NCCL may need no files for connections; empty if it needs them."""
    release = nccl_release()
    if (release and release < CUMEM_HOST) or nccl_setting("NCCL_CUMEM_HOST_ENABLE")[0] == "0":
        return ""
    number = {"x86_64": 239, "aarch64": 236}.get(os.uname().machine)  # get_mempolicy, which Docker forbids
    if number and ctypes.CDLL(None).syscall(number, None, None, 0, None, 0):
        return ""
    return "NCCL 2.24 and newer connect processes through pinned memory if the driver and the container allow it"


def gpu_distances() -> Optional[List[str]]:
    """The links between pairs of GPUs (NV12, PIX, SYS, ...) from nvidia-smi; None if it does not answer."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = re.findall(r"^GPU\d+\s+(.*)$", re.sub(r"\x1b\[[0-9;]*m", "", result.stdout.decode()), re.MULTILINE)
    return [word for row in rows for word in row.split()[: len(rows)] if word != "X"]


SMALL = "/dev/shm has Docker's default of 64 MiB, and the segments need more"
LARGE = "/dev/shm has 1 GiB, as with --shm-size=1g"
USE_SHM = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}  # in both arms, or NCCL would avoid /dev/shm

NO_SPACE = symptom(r"cannot extend /dev/shm/nccl-\w+ to \d+ bytes: No space left on device")
TRANSPORT = "NCCL's shared memory transport, which needs GPUs; the probe makes the same system calls"


def without_gpus(
    name: str,
    jobs: Tuple[Callable[[Context], None], Callable[[Context], None]],
    because: Tuple[str, str],
    expect: Expect = NO_SPACE,
    stands_for: str = TRANSPORT,
    programs: Tuple[str, ...] = (),
) -> Experiment:
    """`jobs` and `because` are those of the control arm and of the treatment arm."""
    fidelity: Dict[str, Any] = {"fidelity": "stand-in", "stands_for": stands_for}
    return Experiment(
        name=name,
        control=Arm(jobs[0], expect=expect, because=because[0], **fidelity),
        treatment=Arm(jobs[1], expect=completed(), because=because[1], **fidelity),
        world_size=1,
        needs=Needs(packages={}, programs=programs),
        expected_s=(0.1, 0.1),
    )


probe = Probe(
    params={"gpus": Param("int", "GPUs of the node that communicate through shared memory, two segments each", 4)},
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                partial(all_reduce, shm_mib=1),
                expect=raised(r"unhandled system error|shared memory segment|failed to extend"),
                because="/dev/shm has 1 MiB, less than NCCL needs",
                fidelity="hardware",
                env=USE_SHM,
            ),
            treatment=Arm(
                partial(all_reduce, shm_mib=ENOUGH_MIB),
                expect=completed(),
                because=LARGE,
                fidelity="hardware",
                env=USE_SHM,
            ),
            world_size=1,
            backend="nccl",
            needs=Needs(gpus=2),
            deadline_s=90,
            expected_s=(15, 15),
        ),
        without_gpus(
            "segments",
            (partial(connect, shm_mib=DOCKERS_MIB), partial(connect, shm_mib=ENOUGH_MIB)),
            (SMALL, LARGE),
        ),
    ),
    variants=(
        without_gpus(
            "unreserved",
            (partial(connect_unreserved, shm_mib=1), partial(connect_unreserved, shm_mib=DOCKERS_MIB)),
            (
                "/dev/shm has 1 MiB and ftruncate reserves nothing, so a write to the segment raises SIGBUS",
                "/dev/shm has 64 MiB, enough for one segment",
            ),
            expect=killed("SIGBUS"),
            stands_for="NCCL 2.12 to 2.18, which make segments with ftruncate",
        ),
        without_gpus(
            "pinned",
            (partial(connect_pinned, shm_mib=1), partial(connect_pinned, shm_mib=DOCKERS_MIB)),
            (
                "/dev/shm has 1 MiB and ftruncate reserves nothing, so the kernel cannot pin the segment's pages",
                "/dev/shm has 64 MiB, enough for one segment",
            ),
            expect=symptom(r"cannot pin the pages of /dev/shm/nccl-\w+: Bad address"),
            stands_for="NCCL 2.16 to 2.18, whose segments CUDA pins",
        ),
        without_gpus(
            "leftovers",
            (partial(connect_beside_leftovers, removed=False), partial(connect_beside_leftovers, removed=True)),
            (
                "segments of a killed job fill half of /dev/shm",
                "the next job first removes the segments of the killed job",
            ),
        ),
        without_gpus(
            "held",
            (partial(connect_beside_holder, ended=False), partial(connect_beside_holder, ended=True)),
            (
                "a process of an earlier job holds deleted segments, which no `ls` shows and no `rm` frees",
                "that process, found by its maps, is ended first",
            ),
            programs=("grep",),
        ),
        without_gpus(
            "remount",
            (partial(connect_after_remount, remounted=False), partial(connect_after_remount, remounted=True)),
            (SMALL, "a remount gives /dev/shm 8 GiB in the running container"),
            programs=("mount",),
        ),
    ),
)

"""Shared memory segments as NCCL makes them, in a /dev/shm of Docker's default size and in a larger one."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.namespaces import own_user, tmpfs_over
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

SEGMENT = 9637888  # bytes of one connection's buffers in NCCL, as its messages name them
DOCKERS_MIB, ENOUGH_MIB = 64, 1024
QUEUE_MIB = 33  # of one rank's proxy in each communicator that uses the network, in NCCL 2.28 and newer
POPULATE_WRITE = 23  # of madvise


def connect(ctx: Context, *, shm_mib: int) -> None:
    """Two rings over the GPUs, one segment for each connection, reserved with fallocate as NCCL does since 2.19."""
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
    """The same with ftruncate, as in NCCL 2.12 to 2.18: nothing is reserved, so the first write finds no page."""
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
    """NCCL 2.16 to 2.18: a number is written behind the buffers, then CUDA pins all pages; here the kernel is asked."""
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
                raise Unavailable("this kernel is older than 5.14 and has no MADV_POPULATE_WRITE") from error
            space = f"/dev/shm of {shm_mib} MiB"
            raise Symptom(f"cannot pin the pages of {path}: {error.strerror} ({error.errno}); {space}") from error


def connect_beside_leftovers(ctx: Context, *, removed: bool) -> None:
    """A job on two GPUs, where one that was killed has left the segments of four connections."""
    own_dev_shm(DOCKERS_MIB)
    for number in range(4):
        with Path(f"/dev/shm/nccl-left{number}").open("wb") as left:
            os.posix_fallocate(left.fileno(), 0, SEGMENT)
    ctx.reached()
    if removed:
        for path in Path("/dev/shm").glob("nccl-*"):
            path.unlink()
    reserve(4, DOCKERS_MIB)


def connect_after_remount(ctx: Context, *, remounted: bool) -> None:
    """Inside a running container: the same /dev/shm gets another size."""
    own_dev_shm(DOCKERS_MIB)
    ctx.reached()
    if remounted:
        command = ["mount", "-o", "remount,size=8g", "/dev/shm"]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if result.returncode:
            raise Unavailable(f"this machine lets nobody remount here: {result.stderr.strip()}")
    reserve(2 * ctx.params["gpus"], DOCKERS_MIB)


def all_reduce(ctx: Context, *, shm_mib: int) -> None:
    """NCCL itself between two GPUs of this process, over shared memory of the host."""
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
        evidence.append(f"{len(stale)} files nccl-* there: of jobs that run now, or left over by killed ones")
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    needed = 2 * gpus * SEGMENT >> 20
    advice = "docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    if gpus < 2:
        return unknown(*evidence, f"{gpus} NVIDIA GPUs are visible here, so NCCL has nobody to share memory with")
    evidence.append(f"{gpus} GPUs: about {needed} MiB where they talk through shared memory (2 segments each)")
    pairs = (gpus - 1) * needed + gpus * QUEUE_MIB  # all-to-all connects every GPU with every other
    if free >= max(ENOUGH_MIB, 4 * pairs):
        several = f"enough for several communicators, also for all-to-all ({pairs} MiB each)"
        return clear(*evidence, f"{several}; what data loader workers take is not counted")
    distances = gpu_distances()
    direct = distances and all(link.startswith("NV") or link in ("PIX", "PXB") for link in distances)
    if direct and free > SEGMENT >> 20:
        alone = "all pairs are on NVLink or PCIe switches: if P2P works there, a job on one node needs little of it"
        across = f"in a job on several, {gpus * QUEUE_MIB} MiB for the queues of each process group"
        return unknown(*evidence, alone, across, advice=advice)
    if free < needed and not distances and free > SEGMENT >> 20:
        return unknown(
            *evidence, "nvidia-smi does not say how they are linked, so whether they do is not known", advice=advice
        )
    if free < needed:
        return exposed(*evidence, advice=advice)
    enough = f"enough for the rings of one communicator; all-to-all takes {pairs} MiB, every further group its own"
    return unknown(*evidence, enough, advice=advice)


def gpu_distances() -> Optional[List[str]]:
    """The links between pairs of GPUs (NV12, PIX, SYS, ...) from nvidia-smi; None without an answer."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = re.findall(r"^GPU\d+\s+(.*)$", re.sub(r"\x1b\[[0-9;]*m", "", result.stdout.decode()), re.MULTILINE)
    return [word for row in rows for word in row.split()[: len(rows)] if word != "X"]


SMALL = "/dev/shm has the 64 MiB that Docker gives it"
LARGE = "/dev/shm has 1 GiB, as after --shm-size=1g"
LIKE_NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}  # in both arms: through /dev/shm, not around it

NO_SPACE = symptom(r"cannot extend /dev/shm/nccl-\w+ to \d+ bytes: No space left on device")
TRANSPORT = "the shared memory transport of NCCL, which needs GPUs; the system calls are the same"


def without_gpus(
    name: str,
    jobs: Tuple[Callable[[Context], None], Callable[[Context], None]],
    because: Tuple[str, str],
    expect: Expect = NO_SPACE,
    stands_for: str = TRANSPORT,
    programs: Tuple[str, ...] = (),
) -> Experiment:
    """`jobs` are without and with the fix."""
    like: Dict[str, Any] = {"fidelity": "stand-in", "stands_for": stands_for}
    return Experiment(
        name=name,
        control=Arm(jobs[0], expect=expect, because=because[0], **like),
        treatment=Arm(jobs[1], expect=completed(), because=because[1], **like),
        world_size=1,
        needs=Needs(packages={}, programs=programs),
        expected_s=(0.1, 0.1),
    )


probe = Probe(
    params={"gpus": Param("int", "GPUs of the node that talk through shared memory, two segments each", 4)},
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                partial(all_reduce, shm_mib=1),
                expect=raised(r"unhandled system error|shared memory segment|failed to extend"),
                because="/dev/shm has 1 MiB",
                fidelity="hardware",
                env=LIKE_NCCL,
            ),
            treatment=Arm(
                partial(all_reduce, shm_mib=ENOUGH_MIB),
                expect=completed(),
                because=LARGE,
                fidelity="hardware",
                env=LIKE_NCCL,
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
            ("/dev/shm has 1 MiB, and nothing was reserved", "/dev/shm has 64 MiB, enough for one segment"),
            expect=killed("SIGBUS"),
            stands_for="NCCL 2.12 to 2.18, which makes its segments in this way",
        ),
        without_gpus(
            "pinned",
            (partial(connect_pinned, shm_mib=1), partial(connect_pinned, shm_mib=DOCKERS_MIB)),
            ("/dev/shm has 1 MiB, and nothing was reserved", "/dev/shm has 64 MiB, enough for one segment"),
            expect=symptom(r"cannot pin the pages of /dev/shm/nccl-\w+: Bad address"),
            stands_for="NCCL 2.16 to 2.18, whose segments CUDA pins",
        ),
        without_gpus(
            "leftovers",
            (partial(connect_beside_leftovers, removed=False), partial(connect_beside_leftovers, removed=True)),
            ("segments of a killed job fill half of /dev/shm", "they were removed"),
        ),
        without_gpus(
            "remount",
            (partial(connect_after_remount, remounted=False), partial(connect_after_remount, remounted=True)),
            (SMALL, "/dev/shm was remounted with 8 GiB, in the running container"),
            programs=("mount",),
        ),
    ),
)

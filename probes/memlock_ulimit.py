"""A process pins memory under the limit on locked memory of a container or a batch job, or under a larger limit."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.namespaces import drop_capabilities
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Probe,
    Symptom,
    Unavailable,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

KIB = 1024
CAP_IPC_LOCK, CAP_SYS_RESOURCE = 14, 24
FIRST_USER_NAMESPACE = (
    "user:[4026531837]"  # PROC_USER_INIT_INO of Linux; a later namespace can have the same map of ids
)
TOO_LITTLE, BUFFER, ENOUGH = 64 * KIB, 1024 * KIB, 4096 * KIB
PIN = '"$1" -I -S -c "$2" "$3"'
MLOCK = """import ctypes, mmap, sys
libc, size = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
buffer = mmap.mmap(-1, size)
address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
print(ctypes.get_errno() if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) else 0)
"""


def register(ctx: Context, *, enough: bool, pin: Callable[[int, int], None]) -> None:
    """Pins one buffer under a small `ulimit -l`, or with `enough` under a larger one, without CAP_IPC_LOCK."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    room_kib = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard // KIB)
    if room_kib < 64:
        raise Unavailable(f"the hard limit on locked memory is {room_kib} KiB here, too little to show the difference")
    buffer_kib = min(1024, room_kib // 4)
    limit_kib = room_kib if enough else buffer_kib // 16
    give_up_privilege()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_kib * KIB, hard))
    import mmap

    buffer = mmap.mmap(-1, buffer_kib * KIB)
    ctx.reached()
    try:
        pin(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer_kib * KIB)
    except OSError as error:
        message = f"cannot pin {buffer_kib} KiB with max locked memory {limit_kib} KiB"
        raise Symptom(f"{message}: {error.strerror} ({error.errno})") from error
    ctx.note(pinned_kib=buffer_kib, max_locked_memory_kib=limit_kib)


def register_within(ctx: Context, *, given_outside: bool) -> None:
    """Pins a buffer as in a container, whose hard limit comes from outside and cannot be raised inside."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < ENOUGH:
        raise Unavailable(f"the hard limit on locked memory is {hard // KIB} KiB here")
    limit = ENOUGH if given_outside else TOO_LITTLE
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    give_up_privilege()
    ctx.reached()
    script = "ulimit -l %d 2>/dev/null; exec %s" % (ENOUGH // KIB, PIN)
    pin_in_shell(script, limit)


def register_up_to_hard(ctx: Context, *, raised_to_hard: bool) -> None:
    """Pins a buffer as in a job script, where the soft limit is small but the hard limit is not."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < ENOUGH:
        raise Unavailable(f"the hard limit on locked memory is {hard // KIB} KiB here")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (TOO_LITTLE, ENOUGH))
    give_up_privilege()
    ctx.reached()
    pin_in_shell(('ulimit -l "$(ulimit -H -l)"; ' if raised_to_hard else "") + "exec " + PIN, TOO_LITTLE)


def register_privileged(ctx: Context, *, capability: bool) -> None:
    """Pins a buffer as root, with or without CAP_IPC_LOCK, under the same small limit."""
    if not may_ignore_limits():
        raise Unavailable("this user has no CAP_IPC_LOCK to keep")
    if not capability:
        give_up_privilege()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (TOO_LITTLE, TOO_LITTLE))
    ctx.reached()
    pin_in_shell("exec " + PIN, TOO_LITTLE)


def pin_in_shell(script: str, limit: int) -> None:
    """Runs the script, which pins the buffer in a new program; raises Symptom if the kernel refuses. In bytes."""
    command = ["bash", "-c", script, "bash", sys.executable, MLOCK, str(BUFFER)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=20)
    number = int(result.stdout)
    if number:
        message = f"cannot pin {BUFFER // KIB} KiB with max locked memory {limit // KIB} KiB"
        raise Symptom(f"{message}: {os.strerror(number)} ({number})")


def lock(address: int, size: int) -> None:
    """Locks memory with mlock, which the kernel checks against the same limit as pinned memory. Raises OSError."""
    if libc().mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
        raise_errno()


def register_with_card(address: int, size: int) -> None:
    """Registers memory with ibv_reg_mr on the first RDMA card of this machine, as NCCL does; sends nothing."""
    try:
        verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as error:
        raise Unavailable("this machine has no libibverbs.so.1") from error
    for name in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr"):
        getattr(verbs, name).restype = ctypes.c_void_p
    devices = verbs.ibv_get_device_list(None)
    first = ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))[0] if devices else None
    if not first:
        raise Unavailable("this machine has no InfiniBand or RoCE card")
    card = verbs.ibv_open_device(ctypes.c_void_p(first))
    if not card:
        raise Unavailable("kb cannot open the InfiniBand or RoCE card (/dev/infiniband)")
    domain = verbs.ibv_alloc_pd(ctypes.c_void_p(card))
    if not domain:
        raise_errno()
    access = 1  # IBV_ACCESS_LOCAL_WRITE
    if not verbs.ibv_reg_mr(ctypes.c_void_p(domain), ctypes.c_void_p(address), ctypes.c_size_t(size), access):
        raise_errno()


def give_up_privilege() -> None:
    """Drops CAP_IPC_LOCK, so that the limit applies to root too, and CAP_SYS_RESOURCE, which may raise the limit."""
    drop_capabilities(CAP_IPC_LOCK, CAP_SYS_RESOURCE)


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def raise_errno() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


IN_A_JOB = ("LOCAL_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def check(_: Mapping[str, Any]) -> Finding:
    """Is the limit of this process too small for the RDMA cards of this host?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    evidence = [
        f"max locked memory of this process (ulimit -l): {describe_limit(soft)}, hard limit {describe_limit(hard)}"
    ]
    cards = rdma_devices()
    if cards is None:
        evidence.append("RDMA devices: kb cannot read /sys/class, so there may be some")
    else:
        evidence.append(f"RDMA devices: {', '.join(cards) or 'none in /sys/class/infiniband'}")
    reason = ""
    if soft == resource.RLIM_INFINITY:
        reason = "this limit is no obstacle"
    elif may_ignore_limits():
        reason = "this process has CAP_IPC_LOCK, so the limit applies to ordinary users only"
    elif cards == []:
        reason = "without such a device, NCCL registers no memory"
    if reason and not any(name in os.environ for name in IN_A_JOB):
        return unknown(
            *evidence,
            reason,
            "a job under sshd, mpirun, slurmd or in a container may have another limit, by user and node",
            advice="run this instead of a rank, as srun, mpirun or torchrun start it",
        )
    if reason:
        return clear(*evidence, reason)
    if cards is None:
        return unknown(*evidence, advice="run ls /sys/class/infiniband on the host")
    if soft < 512 * KIB * KIB:
        return exposed(
            *evidence,
            advice="set it to unlimited: in /etc/security/limits.d, with LimitMEMLOCK=infinity for slurmd or "
            "containerd, or with docker run --ulimit memlock=-1",
        )
    return unknown(*evidence, "this is more than most jobs pin, but NVIDIA recommends unlimited")


def rdma_devices() -> Optional[List[str]]:
    """Lists the devices in /sys/class/infiniband, also EFA, and those of Slingshot; None if sysfs is hidden."""
    try:
        classes = os.listdir("/sys/class")
        if "net" not in classes:
            return None
        return sorted(
            name for key in ("infiniband", "cxi") if key in classes for name in os.listdir(f"/sys/class/{key}")
        )
    except OSError:
        return None


def describe_limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // KIB} KiB"


def may_ignore_limits() -> bool:
    """Has this process CAP_IPC_LOCK? It counts only in the first user namespace."""
    try:
        status = Path("/proc/self/status").read_text()
        outermost = os.readlink("/proc/self/ns/user") == FIRST_USER_NAMESPACE
    except OSError:
        return False
    words = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return outermost and bool(words) and bool(int(words[0], 16) >> CAP_IPC_LOCK & 1)


REFUSED = symptom(r"cannot pin \d+ KiB with max locked memory \d+ KiB: Cannot allocate memory")
SMALL = "max locked memory is a sixteenth of the buffer (64 KiB for 1 MiB)"
LARGE = "max locked memory is four times the buffer"
STANDS_FOR = "ibv_reg_mr of an InfiniBand or RoCE card; the kernel checks mlock against the same limit"


def in_shell(name: str, job: Callable[..., None], fix: str, because: Tuple[str, str]) -> Experiment:
    """Returns an experiment; the arms differ in the keyword `fix`, and `because` describes both."""
    common: Dict[str, Any] = {"fidelity": "stand-in", "stands_for": STANDS_FOR}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect=REFUSED, because=because[0], **common),
        treatment=Arm(partial(job, **{fix: True}), expect=completed(), because=because[1], **common),
        world_size=1,
        needs=Needs(packages={}, programs=("bash",)),
        expected_s=(0.2, 0.2),
    )


def experiment(name: str, pin: Callable[[int, int], None], programs: Tuple[str, ...] = (), **arms: Any) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(register, enough=False, pin=pin), expect=REFUSED, because=SMALL, **arms),
        treatment=Arm(partial(register, enough=True, pin=pin), expect=completed(), because=LARGE, **arms),
        world_size=1,
        needs=Needs(packages={}, programs=programs),
        expected_s=(0.1, 0.1),
    )


probe = Probe(
    check=check,
    experiments=(experiment("mlock", lock, fidelity="stand-in", stands_for=STANDS_FOR),),
    variants=(
        in_shell(
            "hard-limit",
            register_within,
            "given_outside",
            (
                "the hard limit from outside is 64 KiB, so ulimit -l inside cannot raise it",
                "the larger limit comes from outside, as with --ulimit memlock",
            ),
        ),
        in_shell(
            "soft-to-hard",
            register_up_to_hard,
            "raised_to_hard",
            (
                "the process inherits a soft limit of 64 KiB",
                "the script raises the soft limit to the hard limit before it starts the rank",
            ),
        ),
        in_shell(
            "capability",
            register_privileged,
            "capability",
            (
                "root has no CAP_IPC_LOCK, as in an ordinary container",
                "root has CAP_IPC_LOCK, under the same limit",
            ),
        ),
        experiment("verbs", register_with_card, programs=("ibv_devices",), fidelity="cpu"),
    ),
)

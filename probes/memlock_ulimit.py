"""Pinning memory under the limits on locked memory of a container or a batch job, and under a larger one."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

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
FIRST_USER_NAMESPACE = "user:[4026531837]"  # PROC_USER_INIT_INO of Linux; its map of ids may be that of a later one
DROP_FROM_BOUNDING_SET = 24  # of prctl(2): else root has it again in the next program
TOO_LITTLE, BUFFER, ENOUGH = 64 * KIB, 1024 * KIB, 4096 * KIB
PIN = '"$1" -I -S -c "$2" "$3"'
MLOCK = """import ctypes, mmap, sys
libc, size = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
buffer = mmap.mmap(-1, size)
address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
print(ctypes.get_errno() if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) else 0)
"""


def register(ctx: Context, *, enough: bool, pin: Callable[[int, int], None]) -> None:
    """Pin one buffer as a process with this `ulimit -l`, and without the privilege to ignore it."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    room_kib = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard // KIB)
    if room_kib < 64:
        raise Unavailable(f"the hard limit on locked memory is {room_kib} KiB here: too little to show the difference")
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
        what = f"cannot pin {buffer_kib} KiB with max locked memory {limit_kib} KiB"
        raise Symptom(f"{what}: {error.strerror} ({error.errno})") from error
    ctx.note(pinned_kib=buffer_kib, max_locked_memory_kib=limit_kib)


def register_within(ctx: Context, *, given_outside: bool) -> None:
    """As in a container: the hard limit comes from outside, and inside nobody has the right to raise it."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < ENOUGH:
        raise Unavailable(f"the hard limit on locked memory is {hard // KIB} KiB here")
    given = ENOUGH if given_outside else TOO_LITTLE
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (given, given))
    give_up_privilege()
    ctx.reached()
    script = "ulimit -l %d 2>/dev/null; exec %s" % (ENOUGH // KIB, PIN)
    pin_in_shell(script, given)


def register_up_to_hard(ctx: Context, *, raised_to_hard: bool) -> None:
    """As in a job script: the soft limit is small, the hard one is not."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < ENOUGH:
        raise Unavailable(f"the hard limit on locked memory is {hard // KIB} KiB here")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (TOO_LITTLE, ENOUGH))
    give_up_privilege()
    ctx.reached()
    pin_in_shell(('ulimit -l "$(ulimit -H -l)"; ' if raised_to_hard else "") + "exec " + PIN, TOO_LITTLE)


def register_privileged(ctx: Context, *, capability: bool) -> None:
    """Root with CAP_IPC_LOCK, or without it, under the same small limit."""
    if not may_ignore_limits():
        raise Unavailable("this user has no CAP_IPC_LOCK to keep")
    if not capability:
        give_up_privilege()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (TOO_LITTLE, TOO_LITTLE))
    ctx.reached()
    pin_in_shell("exec " + PIN, TOO_LITTLE)


def pin_in_shell(script: str, limit: int) -> None:
    command = ["bash", "-c", script, "bash", sys.executable, MLOCK, str(BUFFER)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=20)
    number = int(result.stdout)
    if number:
        what = f"cannot pin {BUFFER // KIB} KiB with max locked memory {limit // KIB} KiB"
        raise Symptom(f"{what}: {os.strerror(number)} ({number})")


def lock(address: int, size: int) -> None:
    """Locked memory is held against the same limit as memory that a network card pins, though counted apart."""
    if libc().mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
        raise_errno()


def register_with_card(address: int, size: int) -> None:
    """What NCCL does: ibv_reg_mr on an InfiniBand or RoCE card of this machine. Nothing is sent."""
    try:
        verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as error:
        raise Unavailable("no libibverbs.so.1 on this machine") from error
    for name in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr"):
        getattr(verbs, name).restype = ctypes.c_void_p
    devices = verbs.ibv_get_device_list(None)
    first = ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))[0] if devices else None
    if not first:
        raise Unavailable("no InfiniBand or RoCE card on this machine")
    card = verbs.ibv_open_device(ctypes.c_void_p(first))
    if not card:
        raise Unavailable("the InfiniBand or RoCE card cannot be opened here (/dev/infiniband)")
    domain = verbs.ibv_alloc_pd(ctypes.c_void_p(card))
    if not domain:
        raise_errno()
    access = 1  # IBV_ACCESS_LOCAL_WRITE
    if not verbs.ibv_reg_mr(ctypes.c_void_p(domain), ctypes.c_void_p(address), ctypes.c_size_t(size), access):
        raise_errno()


def give_up_privilege() -> None:
    """Without CAP_IPC_LOCK, as in a container, the limit applies to root too; without the other none can raise it."""
    for capability in (CAP_IPC_LOCK, CAP_SYS_RESOURCE):
        libc().prctl(DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)  # refused to a user who has neither
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low words, then high words
    if libc().capget(header, sets):
        raise_errno()
    for number in range(3):
        sets[number] &= ~(1 << CAP_IPC_LOCK | 1 << CAP_SYS_RESOURCE)
    if libc().capset(header, sets):
        raise Unavailable("cannot give up CAP_IPC_LOCK: %s" % os.strerror(ctypes.get_errno()))


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def raise_errno() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


IN_A_JOB = ("LOCAL_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def check(_: Mapping[str, Any]) -> Finding:
    """The limit of this process, what it means here, and whether there is a card that needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    evidence = [
        f"max locked memory of this process (ulimit -l): {describe_limit(soft)}, hard limit {describe_limit(hard)}"
    ]
    cards = rdma_devices()
    if cards is None:
        evidence.append("RDMA devices: /sys/class cannot be read here, so there may be some")
    else:
        evidence.append(f"RDMA devices: {', '.join(cards) or 'none in /sys/class/infiniband'}")
    found = ""
    if soft == resource.RLIM_INFINITY:
        found = "this limit is no obstacle"
    elif may_ignore_limits():
        found = "this process has CAP_IPC_LOCK, so the limit does not bind it; it binds ordinary users"
    elif cards == []:
        found = "without such a device NCCL registers no memory"
    if found and not any(name in os.environ for name in IN_A_JOB):
        return unknown(
            *evidence,
            found,
            "what sshd, mpirun, slurmd or a container gives to a job, as its user and on its node, may differ",
            advice="run it in the place of a rank, as srun, mpirun or torchrun start it",
        )
    if found:
        return clear(*evidence, found)
    if cards is None:
        return unknown(*evidence, advice="look on the host: ls /sys/class/infiniband")
    if soft < 512 * KIB * KIB:
        return exposed(
            *evidence,
            advice="unlimited: /etc/security/limits.d, LimitMEMLOCK=infinity for slurmd or containerd, docker run "
            "--ulimit memlock=-1",
        )
    return unknown(*evidence, "more than most jobs pin; NVIDIA asks for unlimited")


def rdma_devices() -> Optional[List[str]]:
    """What is in /sys/class/infiniband, EFA too; Slingshot has a class of its own. None where sysfs is hidden."""
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
    """CAP_IPC_LOCK counts in the first user namespace only."""
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
STANDS_FOR = "ibv_reg_mr of an InfiniBand or RoCE card; mlock is held against the same limit"


def in_shell(name: str, job: Callable[..., None], fix: str, because: Tuple[str, str]) -> Experiment:
    """`fix` is the keyword of the job that differs; `because` says what the arms do without and with it."""
    like: Dict[str, Any] = {"fidelity": "stand-in", "stands_for": STANDS_FOR}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect=REFUSED, because=because[0], **like),
        treatment=Arm(partial(job, **{fix: True}), expect=completed(), because=because[1], **like),
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
                "the hard limit from outside is 64 KiB, and ulimit -l inside cannot raise it",
                "the limit is given from outside, as by --ulimit memlock",
            ),
        ),
        in_shell(
            "soft-to-hard",
            register_up_to_hard,
            "raised_to_hard",
            (
                "the soft limit is 64 KiB, as inherited",
                "the script raises it to the hard one before it starts the rank",
            ),
        ),
        in_shell(
            "capability",
            register_privileged,
            "capability",
            ("root without CAP_IPC_LOCK, as in an ordinary container", "root with it, under the same limit"),
        ),
        experiment("verbs", register_with_card, programs=("ibv_devices",), fidelity="cpu"),
    ),
)

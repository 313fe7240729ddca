"""One process takes a descriptor of another, as torch does to receive CUDA memory of expandable segments.

torch exports such memory as a file descriptor, and the receiver copies the descriptor with pidfd_getfd. The kernel
treats that call like ptrace: a seccomp profile, Yama or an old kernel refuses it. On the CPU a memfd takes the place of
the memory; the calls are the same.
"""

from __future__ import annotations

import ctypes
import errno
import inspect
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Tuple

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

PIDFD_OPEN, PIDFD_GETFD = 434, 438  # from unistd.h, the same on all architectures
CAP_SYS_PTRACE = 19
NO_NEW_PRIVILEGES, SET_SECCOMP = 38, 22  # of prctl(2)
CONTENT = b"weights"


def take(pid: int, descriptor: int) -> Tuple[str, int, bytes]:
    """Copies a descriptor of another process. Returns the call that failed, its error, and what the memory holds."""
    system = libc()
    pidfd = system.syscall(PIDFD_OPEN, pid, 0)
    if pidfd < 0:
        return "pidfd_open", ctypes.get_errno(), b""
    copy = system.syscall(PIDFD_GETFD, pidfd, descriptor, 0)
    number = ctypes.get_errno()
    os.close(pidfd)
    if copy < 0:
        return "pidfd_getfd", number, b""
    content = os.pread(copy, len(CONTENT), 0)
    os.close(copy)
    return "", 0, content


def own(connection: Any, tracer: bool, privileged: bool) -> None:
    """The sender: owns the memory until the receiver has finished."""
    if not privileged:
        drop_capabilities(CAP_SYS_PTRACE)
    if tracer:
        set_ptracer, any_process = 0x59616D61, ctypes.c_ulong(-1)
        ctypes.CDLL(None).prctl(set_ptracer, any_process, 0, 0, 0)
    descriptor = os.memfd_create("segment")
    os.write(descriptor, CONTENT)
    connection.send((os.getpid(), descriptor))
    connection.recv()


def receive(connection: Any, filtered: bool, privileged: bool) -> None:
    """The receiver: a sibling of the sender, as an inference engine is of a trainer."""
    pid, descriptor = connection.recv()
    if not privileged:
        drop_capabilities(CAP_SYS_PTRACE)
    if filtered:
        refuse_getfd()
    connection.send(take(pid, descriptor))


def transfer(*, filtered: bool = False, privileged: bool = True, tracer: bool = True) -> Tuple[str, int, bytes]:
    """Starts a sender and a receiver. Returns what the receiver got."""
    fork = multiprocessing.get_context("fork")
    (sender_end, to_sender), (receiver_end, to_receiver) = fork.Pipe(), fork.Pipe()
    processes = [
        fork.Process(target=own, args=(sender_end, tracer, privileged), daemon=True),
        fork.Process(target=receive, args=(receiver_end, filtered, privileged), daemon=True),
    ]
    for process in processes:
        process.start()
    to_receiver.send(to_sender.recv())
    got: Tuple[str, int, bytes] = to_receiver.recv()
    to_sender.send("done")
    for process in processes:
        process.join(10)
    return got


def share(ctx: Context, *, capability: bool) -> None:
    """Shares memory in a container with Docker's default profile, which has no SYS_PTRACE, or (`capability`) has it."""
    call, number, _ = transfer()
    if call:
        raise Unavailable(f"this machine refuses {call} to every process: {os.strerror(number)}")
    ctx.reached()
    finish(ctx, *transfer(filtered=not capability, privileged=capability))


def share_beside_yama(ctx: Context, *, declared: bool) -> None:
    """Yama lets only an ancestor take a descriptor, unless the sender has declared that others may."""
    if yama_scope() != 1:
        raise Unavailable("Yama's ptrace_scope is not 1 on this machine")
    ctx.reached()
    finish(ctx, *transfer(privileged=False, tracer=declared))


def share_through_host(ctx: Context, *, copied: bool) -> None:
    """Under the filter the receiver gets a descriptor of the memory, or (`copied`) a CPU tensor with its content."""
    if not copied:
        share(ctx, capability=False)
        return
    import torch
    import torch.multiprocessing as multiprocess

    fork = multiprocess.get_context("fork")
    tensors, sums = fork.SimpleQueue(), fork.SimpleQueue()

    def add_up() -> None:
        refuse_getfd()
        sums.put(tensors.get().sum().item())

    receiver = fork.Process(target=add_up, daemon=True)
    receiver.start()
    ctx.reached()
    tensors.put(torch.ones(1024))
    assert sums.get() == 1024
    receiver.join(10)


def finish(ctx: Context, call: str, number: int, content: bytes) -> None:
    if call:
        raise Symptom(f"{call}: {os.strerror(number)}")
    assert content == CONTENT
    ctx.note(bytes_shared=len(content))


# --- the same with CUDA memory: torch itself makes the calls ----------------------------------------------------------

RECEIVER = """import ctypes, errno, pickle, sys, torch
from typing import Any

PIDFD_GETFD, NO_NEW_PRIVILEGES, SET_SECCOMP = {numbers}

{functions}

torch.cuda.init()
refuse_getfd()
print(int(pickle.load(sys.stdin.buffer).sum()))
"""


def receiver() -> str:
    """The program of the receiver. Its interpreter is the reader's, which cannot import this file."""
    functions = "\n\n".join(inspect.getsource(each) for each in (Instruction, Program, libc, refuse_getfd))
    return RECEIVER.format(numbers=(PIDFD_GETFD, NO_NEW_PRIVILEGES, SET_SECCOMP), functions=functions)


def share_cuda(ctx: Context) -> None:
    """Sends a CUDA tensor to a process that may not call pidfd_getfd. The arms differ in PYTORCH_CUDA_ALLOC_CONF."""
    import torch
    from torch.multiprocessing.reductions import ForkingPickler

    tensor = torch.ones(1024, device=ctx.device)
    ctx.reached()
    ran = subprocess.run(
        [sys.executable, "-c", receiver()],
        input=bytes(ForkingPickler.dumps(tensor)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        check=False,
        timeout=50,
    )
    if ran.returncode:
        raise Symptom(ran.stderr.decode(errors="replace").strip().splitlines()[-1])
    assert int(ran.stdout) == tensor.numel()


# --- who may call pidfd_getfd -----------------------------------------------------------------------------------------


class Instruction(ctypes.Structure):
    """One instruction of a seccomp filter: struct sock_filter of linux/filter.h."""

    _fields_ = [
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


class Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]


def refuse_getfd() -> None:
    """Lets the kernel answer pidfd_getfd with EPERM in this process, as Docker's default profile does."""
    load, jump_if_equal, answer = 0x20, 0x15, 0x06  # of linux/bpf_common.h
    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000  # of linux/seccomp.h
    lines = [(load, 0, 0, 0), (jump_if_equal, 0, 1, PIDFD_GETFD), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    program = Program(len(lines), (Instruction * len(lines))(*[Instruction(*line) for line in lines]))
    system = libc()
    system.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if system.prctl(SET_SECCOMP, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses a seccomp filter")


def yama_scope() -> int:
    """kernel.yama.ptrace_scope, or 0 without Yama."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


def libc() -> Any:
    system = ctypes.CDLL(None, use_errno=True)
    system.syscall.restype = ctypes.c_long
    return system


def check(_: Mapping[str, Any]) -> Finding:
    """Takes a descriptor of a sibling process with the rights that this process has."""
    call, number, _content = transfer(tracer=False)
    scope = yama_scope()
    if not call:
        evidence = "a process here may take a descriptor of another of the same user (pidfd_getfd)"
        if os.geteuid() == 0 and scope:
            advice = "run it as the user of the job"
            return unknown(evidence, f"but kernel.yama.ptrace_scope is {scope} and this is root", advice=advice)
        return clear(evidence)
    evidence = f"{call}: {os.strerror(number)}"
    if number == errno.ENOSYS:
        return exposed(evidence, "the kernel or the sandbox has no such call", advice=ALLOCATOR)
    if number != errno.EPERM:
        return unknown(evidence, "this is not a refusal", advice="run it again")
    if scope == 1 and not transfer(tracer=True)[0]:
        return exposed(evidence, "but not if the sender declares a tracer: Yama", advice=f"{ALLOCATOR}, or see Fix 3")
    if scope > 1:
        return exposed(evidence, f"kernel.yama.ptrace_scope is {scope}", advice=ALLOCATOR)
    return exposed(evidence, advice=f"{ALLOCATOR}, or start the container with --cap-add=SYS_PTRACE")


ALLOCATOR = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False for the process that sends CUDA tensors"
REFUSED = symptom(r"pidfd_getfd: Operation not permitted")
UNDER_PROFILE = "the receiver runs under a profile that refuses pidfd_getfd"
STANDS_FOR = "CUDA memory of expandable segments, which torch exports as a descriptor; here a memfd"


def experiment(name: str, job: Callable[..., None], fix: str, because: Tuple[str, str], **needs: Any) -> Experiment:
    """`fix` is the keyword of the job that differs; `because` says what the arms do without and with it."""
    like: Any = {"fidelity": "stand-in", "stands_for": STANDS_FOR}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect=REFUSED, because=because[0], **like),
        treatment=Arm(partial(job, **{fix: True}), expect=completed(), because=because[1], **like),
        world_size=1,
        needs=Needs(**{"packages": {}, **needs}),
        expected_s=(0.3, 0.3),
    )


def with_cuda(setting: str, **ends: Any) -> Arm:
    env = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{setting}"}
    return Arm(share_cuda, fidelity="hardware", env=env, **ends)


probe = Probe(
    check=check,
    experiments=(
        experiment(
            "profile",
            share,
            "capability",
            (f"{UNDER_PROFILE}, as Docker's does without SYS_PTRACE", "the profile has the rule that SYS_PTRACE adds"),
        ),
    ),
    variants=(
        Experiment(
            name="expandable-segments",
            control=with_cuda("True", expect=REFUSED, because=f"{UNDER_PROFILE}, and the tensor is in such a segment"),
            treatment=with_cuda("False", expect=completed(), because="the tensor is in an ordinary segment"),
            world_size=1,
            backend="nccl",
            needs=Needs(gpus=1, packages={"torch": ">=2.5"}),
            deadline_s=90,
            expected_s=(20, 20),
        ),
        experiment(
            "yama",
            share_beside_yama,
            "declared",
            ("a sibling takes the descriptor, which Yama refuses", "the sender first declares that any process may"),
        ),
        experiment(
            "host-copy",
            share_through_host,
            "copied",
            (UNDER_PROFILE, "the receiver gets a copy in host memory instead"),
            packages={"torch": ">=2.1"},
        ),
    ),
)

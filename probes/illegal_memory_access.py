"""An address that is not allocated. On a GPU: a tensor that outlived its memory. On the CPU: an offset in 32 bits."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import partial
from typing import Any, Callable, Mapping

from kb.packages import version
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
    completed,
    exposed,
    killed,
    raised,
    symptom,
    unknown,
)

MIB = 1 << 20


def borrow(ctx: Context, *, owner_lives: bool) -> None:
    """A tensor over memory that belongs to another tensor, as extensions and custom allocators create them.

    The kernel is queued without an error; the error comes with the next call that waits for the GPU.
    """
    import torch

    class Borrowed:
        __cuda_array_interface__: Any = None

    owner = torch.zeros(64 * MIB // 4, device=ctx.device)  # 64 MiB: a segment of its own, given back when it is freed
    torch.cuda.synchronize()
    borrowed = Borrowed()
    borrowed.__cuda_array_interface__ = {
        "shape": (owner.numel(),), "typestr": "<f4", "data": (owner.data_ptr(), False), "version": 2
    }  # fmt: skip
    view = torch.as_tensor(borrowed, device=ctx.device)
    ctx.reached()
    if not owner_lives:
        del owner
        torch.cuda.empty_cache()  # cudaFree: nothing is mapped at this address any more
    view.add_(1)
    ctx.note(kernel_was_queued=True)
    torch.cuda.synchronize()
    assert view.sum().item() == view.numel(), "the sum over the borrowed memory is wrong"


ROWS, STRIDE = 1 << 19, 1 << 12  # 524288 tokens of width 4096: the last one begins at element 2**31


def memory(size: int, libc: Any) -> int:
    """The address of so many bytes of memory that nobody else uses: addresses, hardly any pages."""
    private_anonymous_noreserve = 0x2 | 0x20 | 0x4000
    start = libc.mmap(None, size, 0x1 | 0x2, private_anonymous_noreserve, -1, 0)
    if start in (None, ctypes.c_void_p(-1).value):
        raise Unavailable(f"{size >> 20} MiB of addresses cannot be reserved here (vm.overcommit_memory, ulimit -v)")
    return int(start)


def c_library() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def route(ctx: Context, *, bits: int = 32, most: int = ROWS, is_mapped: bool = False) -> None:
    """Rank 1 got many tokens, rank 0 few. Each reads its last row as a kernel does: base + row * stride."""
    import torch

    dist = ctx.init_process_group(timeout_s=10)
    libc = c_library()
    span = ROWS * STRIDE  # 2 GiB of other memory below the tensor, 2 GiB of tensor
    start = memory(2 * span + STRIDE, libc)
    base = start + span

    def element(row: int) -> Any:
        offset = row * STRIDE
        if bits == 32:
            offset = ctypes.c_int32(offset).value  # what int32 * int32 gives in a kernel
        return ctypes.c_uint8.from_address(base + offset)

    last = most if ctx.rank == 1 else 10
    ctypes.c_uint8.from_address(base + last * STRIDE).value = 7
    ctx.reached()
    read = element(last).value
    ctx.note(read_while_the_address_was_mapped=read, should_be=7)
    if is_mapped:
        if read != 7:
            raise Symptom(f"rank {ctx.rank} reads {read} instead of 7, and no error")
        return
    libc.mprotect(start, span, 0)  # the memory below is given back
    total = torch.tensor([float(element(last).value)])
    dist.all_reduce(total)
    assert total.item() == 14, total


def borrow_on_cpu(ctx: Context, *, owner_lives: bool) -> None:
    """A tensor over foreign memory, which its owner gives back, before the tensor is used or after."""
    import torch

    libc = c_library()
    start = memory(MIB, libc)
    view = torch.frombuffer((ctypes.c_uint8 * MIB).from_address(start), dtype=torch.uint8)
    ctx.reached()
    if not owner_lives:
        libc.munmap(start, MIB)
    view.add_(1)
    assert view.sum().item() == MIB


SUSPECTS = (
    "flash-attn", "xformers", "bitsandbytes", "apex", "deepspeed", "triton", "liger-kernel", "flash-linear-attention",
    "megablocks", "transformer-engine", "mamba-ssm", "causal-conv1d", "unsloth", "vllm", "grouped-gemm",
)  # fmt: skip
FAULT = re.compile(r"NVRM: Xid \([^)]*\): (?:31,|13, .*Out Of Range Address).*")


def check(params: Mapping[str, Any]) -> Finding:
    """Does a tensor exceed 32 bits? Faults in the kernel log are told; they may be another program's, and old."""
    faults = None
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=0.7)
        if log.returncode == 0:
            faults = [result.group(0) for result in FAULT.finditer(log.stdout)]
    except (OSError, subprocess.TimeoutExpired):
        pass
    if faults is None:
        text = "the kernel log cannot be read"
    elif faults:
        text = f"{len(faults)} memory faults of GPU programs in the kernel log, the last: {faults[-1][:200]}"
    else:
        text = "no memory fault of a GPU program in the kernel log"
    installed = [f"{name} {found}" for name in SUSPECTS if (found := version(name))]
    kernels = f"packages with kernels of their own: {', '.join(installed) or 'none'}"
    tokens, width = params["tokens"], params["width"]
    if tokens and width and min(tokens, width) > 0 and tokens * width > 2**31:
        size = f"{tokens} x {width} is {tokens * width / 2**31:.2f} times what an offset of 32 bits can reach"
        return exposed(size, text, kernels, advice="fewer tokens per GPU, or kernels with offsets of 64 bits")
    return unknown(text, kernels, "a bad kernel cannot be seen from here", advice="--set tokens=... --set width=...")


STANDS_FOR = "a kernel's 32-bit offset on a GPU, whose memory protection answers later and through another call"

RETURNS_LATE = "a GPU, whose memory protection answers later and through another call"


def stand_in(
    name: str,
    control: Callable[..., None],
    treatment: Callable[..., None],
    expect: Expect,
    because: str,
    fix: str,
    ranks: int = 2,
    stands_for: str = STANDS_FOR,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, expect=expect, because=because, fidelity="stand-in", stands_for=stands_for),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity="stand-in", stands_for=stands_for),
        world_size=ranks,
        expected_s=(0.3, 0.3),
    )


probe = Probe(
    check=check,
    params={
        "tokens": Param("int", "rows of your largest tensor on one GPU: micro batch times sequence length, or more"),
        "width": Param("int", "its columns: vocabulary, hidden size, heads times head size"),
    },
    experiments=(
        Experiment(
            name="cuda",
            control=Arm(
                partial(borrow, owner_lives=False),
                expect=raised(r"an illegal memory access was encountered"),
                because="the tensor's memory was freed; the kernel faults (this also logs an Xid 31)",
                fidelity="hardware",
            ),
            treatment=Arm(
                partial(borrow, owner_lives=True),
                expect=completed(),
                because="the owner of the memory lives as long as the tensor",
                fidelity="hardware",
            ),
            world_size=1,
            backend="nccl",
            needs=Needs(gpus=1, gpu_memory_mib=512),
            deadline_s=60,
            settle_s=3,
            expected_s=(10, 10),
        ),
        stand_in(
            "gloo",
            partial(route, bits=32),
            partial(route, bits=64),
            killed("SIGSEGV"),
            "rank 1's offset of 2**31 wraps to -2**31, in front of its tensor",
            "the same offset in 64 bits",
        ),
    ),
    variants=(
        stand_in(
            "silent",
            partial(route, bits=32, is_mapped=True),
            partial(route, bits=64, is_mapped=True),
            symptom(r"rank 1 reads 0 instead of 7, and no error"),
            "the wrapped address is mapped, so rank 1 reads what is not its own",
            "the same offset in 64 bits",
        ),
        stand_in(
            "few-tokens",
            partial(route, bits=32),
            partial(route, bits=32, most=ROWS // 2),
            killed("SIGSEGV"),
            "rank 1's offset of 2**31 wraps to -2**31, in front of its tensor",
            "half the rows, with the same offsets of 32 bits",
        ),
        stand_in(
            "lifetime",
            partial(borrow_on_cpu, owner_lives=False),
            partial(borrow_on_cpu, owner_lives=True),
            killed("SIGSEGV"),
            "the memory of a tensor is given back while the tensor is in use",
            "the owner of the memory lives as long as the tensor",
            ranks=1,
            stands_for=RETURNS_LATE,
        ),
    ),
)

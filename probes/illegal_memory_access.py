"""A kernel uses an unmapped address: on a GPU after the memory was freed, on the CPU because a 32-bit offset wraps."""

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
    """Makes a tensor over memory of another tensor, as extensions and custom allocators do, and writes to it.

    torch queues the kernel without an error; the next call that waits for the GPU raises it.
    """
    import torch

    class Borrowed:
        __cuda_array_interface__: Any = None

    owner = torch.zeros(64 * MIB // 4, device=ctx.device)  # 64 MiB get their own segment, which empty_cache frees
    torch.cuda.synchronize()
    borrowed = Borrowed()
    borrowed.__cuda_array_interface__ = {
        "shape": (owner.numel(),), "typestr": "<f4", "data": (owner.data_ptr(), False), "version": 2
    }  # fmt: skip
    view = torch.as_tensor(borrowed, device=ctx.device)
    ctx.reached()
    if not owner_lives:
        del owner
        torch.cuda.empty_cache()  # this calls cudaFree, so the address is no longer mapped
    view.add_(1)
    ctx.note(kernel_was_queued=True)
    torch.cuda.synchronize()
    assert view.sum().item() == view.numel(), "the sum over the borrowed memory is wrong"


ROWS, STRIDE = 1 << 19, 1 << 12  # 524288 tokens of width 4096: row 524288 begins at element 2**31


def memory(size: int, libc: Any) -> int:
    """Reserves `size` bytes of addresses, without pages, and returns the first address. Raises Unavailable."""
    private_anonymous_noreserve = 0x2 | 0x20 | 0x4000
    start = libc.mmap(None, size, 0x1 | 0x2, private_anonymous_noreserve, -1, 0)
    if start in (None, ctypes.c_void_p(-1).value):
        raise Unavailable(f"kb cannot reserve {size >> 20} MiB of addresses here (vm.overcommit_memory, ulimit -v)")
    return int(start)


def c_library() -> Any:
    """Loads the C library and declares the types of its memory calls."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def route(ctx: Context, *, bits: int = 32, most: int = ROWS, is_mapped: bool = False) -> None:
    """Each rank reads its last row, as a kernel does, at base + row * stride; rank 1 has `most` rows, rank 0 has 10."""
    import torch

    dist = ctx.init_process_group(timeout_s=10)
    libc = c_library()
    span = ROWS * STRIDE  # 2 GiB of other memory, then 2 GiB of the tensor
    start = memory(2 * span + STRIDE, libc)
    base = start + span

    def element(row: int) -> Any:
        offset = row * STRIDE
        if bits == 32:
            offset = ctypes.c_int32(offset).value  # int32 * int32 wraps like this in a kernel
        return ctypes.c_uint8.from_address(base + offset)

    last = most if ctx.rank == 1 else 10
    ctypes.c_uint8.from_address(base + last * STRIDE).value = 7
    ctx.reached()
    value = element(last).value
    ctx.note(read_while_the_address_was_mapped=value, should_be=7)
    if is_mapped:
        if value != 7:
            raise Symptom(f"rank {ctx.rank} reads {value} instead of 7, and no error")
        return
    libc.mprotect(start, span, 0)  # the memory below the tensor is freed
    total = torch.tensor([float(element(last).value)])
    dist.all_reduce(total)
    assert total.item() == 14, total


def borrow_on_cpu(ctx: Context, *, owner_lives: bool) -> None:
    """Makes a tensor over borrowed memory, which its owner frees before the tensor is used, unless `owner_lives`."""
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
    """Does a tensor exceed 32-bit offsets? Also reports faults in the kernel log, which may be of another program."""
    text = kernel_log()
    installed = [f"{name} {found}" for name in SUSPECTS if (found := version(name))]
    kernels = f"installed packages with custom kernels: {', '.join(installed) or 'none'}"
    tokens, width = params["tokens"], params["width"]
    if tokens and width and min(tokens, width) > 0 and tokens * width > 2**31:
        size = f"{tokens} x {width} is {tokens * width / 2**31:.2f} times what a 32-bit offset can reach"
        return exposed(size, text, kernels, advice="use fewer tokens per GPU, or kernels with 64-bit offsets")
    why = "kb cannot see whether a kernel is faulty"
    return unknown(text, kernels, why, advice="run --set tokens=32768 --set width=151936, with the sizes of your job")


def kernel_log() -> str:
    """Describes the memory faults of GPU programs in the kernel log."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=0.7)
    except (OSError, subprocess.TimeoutExpired):
        return "kb cannot read the kernel log"
    if log.returncode != 0:
        return "kb cannot read the kernel log"
    faults = [result.group(0) for result in FAULT.finditer(log.stdout)]
    if faults:
        return f"the kernel log has {len(faults)} memory faults of GPU programs, the last: {faults[-1][:200]}"
    return "the kernel log has no memory fault of a GPU program"


STANDS_FOR = "a 32-bit offset in a GPU kernel; a GPU reports the fault later, from another call"
REPORTS_LATE = "a kernel on a GPU, which reports the fault later, from another call"


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
        "tokens": Param("int", "rows of your largest tensor on one GPU: at least micro batch times sequence length"),
        "width": Param("int", "columns of that tensor: vocabulary, hidden size, or heads times head size"),
    },
    experiments=(
        Experiment(
            name="cuda",
            control=Arm(
                partial(borrow, owner_lives=False),
                expect=raised(r"an illegal memory access was encountered"),
                because="the memory of the tensor was freed before the kernel ran (the fault also logs an Xid 31)",
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
            "rank 1's offset of 2**31 wraps to -2**31, so it reads in front of its tensor",
            "rank 1 computes the same offset in 64 bits",
        ),
    ),
    variants=(
        stand_in(
            "silent",
            partial(route, bits=32, is_mapped=True),
            partial(route, bits=64, is_mapped=True),
            symptom(r"rank 1 reads 0 instead of 7, and no error"),
            "the wrapped address is mapped, so rank 1 reads memory outside its tensor",
            "rank 1 computes the same offset in 64 bits",
        ),
        stand_in(
            "few-tokens",
            partial(route, bits=32),
            partial(route, bits=32, most=ROWS // 2),
            killed("SIGSEGV"),
            "rank 1's offset of 2**31 wraps to -2**31, so it reads in front of its tensor",
            "rank 1 has half the rows, with the same 32-bit offsets",
        ),
        stand_in(
            "lifetime",
            partial(borrow_on_cpu, owner_lives=False),
            partial(borrow_on_cpu, owner_lives=True),
            killed("SIGSEGV"),
            "the memory of a tensor is freed while the tensor is in use",
            "the owner of the memory lives as long as the tensor",
            ranks=1,
            stands_for=REPORTS_LATE,
        ),
    ),
)

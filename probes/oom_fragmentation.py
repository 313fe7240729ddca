"""Free memory is in pieces that the allocator can neither return nor join, so a request below their sum fails."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional

from kb.probe import (
    Arm,
    Context,
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
    symptom,
    unknown,
)

MIB = 1 << 20
CPU_BLOCKS, CPU_BLOCK, CPU_REQUEST, CPU_ROOM = 16, 16 * MIB, 28 * MIB, 276 * MIB
CPU_LONGEST = 31 * MIB  # just below the size that glibc maps separately; 12 MiB more than the room at the end
GPU_STEPS, GPU_LONG, GPU_HELD, GPU_REQUEST, GPU_MIB = 4, 240 * MIB, 130 * MIB, 300 * MIB, 1024


def segments(ctx: Context) -> None:
    """The job of both arms, which differ only in expandable_segments, which torch reads from the environment."""
    import torch

    def allocate(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device=ctx.device)

    long = [allocate(GPU_LONG) for _ in range(GPU_STEPS)]
    del long  # four free segments of 240 MiB
    held = [allocate(GPU_HELD) for _ in range(GPU_STEPS)]  # one in each segment, of which 110 MiB remain
    statistics = torch.cuda.memory_stats()
    unallocated = statistics["reserved_bytes.all.current"] - statistics["allocated_bytes.all.current"]
    ctx.reached()
    request_less(ctx, partial(allocate, GPU_REQUEST), unallocated)
    assert len(held) == GPU_STEPS


def heap(ctx: Context, *, returns: bool = False, longest_first: bool = False, request: int = CPU_REQUEST) -> None:
    """Fragments glibc's heap. A free hole below a block in use is returned only if each block is a separate mapping."""
    import torch

    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, 0)
    libc.mallopt(mmap_threshold, MIB if returns else 32 * MIB)  # 32 MiB is the largest that it accepts
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + CPU_ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if longest_first:
        longest, after = (torch.empty(size, dtype=torch.uint8) for size in (request, 2 * MIB))
        hole = range(longest.data_ptr(), longest.data_ptr() + request)
        del longest  # leaves a hole below a block in use, and the next block goes into it
        ctx.note(after_mib=after.nbytes // MIB)
    blocks = [torch.empty(CPU_BLOCK, dtype=torch.uint8) for _ in range(CPU_BLOCKS)]
    held = blocks[0::2] if longest_first else blocks[1::2]
    if longest_first and not any(block.data_ptr() in hole for block in held):
        raise Unavailable("the heap of this process did not put the next block into the hole")
    del blocks
    ctx.reached()
    request_less(ctx, partial(torch.empty, request, dtype=torch.uint8), (CPU_BLOCKS - len(held)) * CPU_BLOCK)
    assert len(held) == CPU_BLOCKS // 2


def request_less(ctx: Context, allocate: Callable[[], Any], free: int) -> None:
    """Allocates less than the free pieces have together."""
    try:
        request = allocate().nbytes
    except RuntimeError as error:  # also torch.OutOfMemoryError
        raise Symptom("%d MiB are free in pieces, and less cannot be had: %s" % (free // MIB, error)) from error
    ctx.note(free_in_pieces_mib=free // MIB, requested_mib=request // MIB)
    assert request < free


NUMBER = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
OLD = re.compile(
    rf"Tried to allocate {NUMBER} \(GPU \d+; {NUMBER} total capacity; {NUMBER} already allocated; {NUMBER} free; "
    rf"{NUMBER} reserved in total by PyTorch"
)
NEW = re.compile(
    rf"Tried to allocate {NUMBER}\. GPU \d* ?has a total capac\w*y of {NUMBER} of which {NUMBER} is free\."
    rf"[\s\S]{{0,4000}}?and {NUMBER} is reserved by PyTorch but unallocated"
)
UNITS = {"bytes": 2.0**-20, "KiB": 2.0**-10, "MiB": 1.0, "GiB": 1024.0, "TiB": 1024.0**2}


def check(params: Mapping[str, Any]) -> Finding:
    """Would the request of the last out-of-memory error in a log fit if all free memory were in one piece?"""
    setting = expandable_setting()
    log = params["log"]
    if log is None:
        return unknown(
            "`log` is not set", setting, advice="--set log=train.log, a log with the whole line of the error"
        )
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - 4 * MIB))
            result = sizes(file.read().decode("utf-8", "replace"))
    except OSError as error:
        return unknown("kb cannot read %s: %s" % (log, error.strerror))
    if result is None:
        return unknown("%s has no CUDA out-of-memory line with all numbers" % log)
    message = (
        "the request was %(tried).0f MiB; %(unallocated).0f MiB were reserved but unallocated, %(free).0f MiB free"
        % result
    )
    if result["has_limit"] and result["unallocated"] < result["tried"]:
        return unknown(message, "a memory fraction limits this process, so it may not use all of the free memory")
    together = result["unallocated"] + result["free"]
    if together < 0.8 * result["tried"]:
        return clear(message, "even in one piece the free memory would be too small, so fragmentation is not the cause")
    if together < result["tried"]:
        return unknown(message, "together the free memory is too small, but only by a little")
    if result["unallocated"] < max(0.02 * result["capacity"], 0.1 * result["tried"]):
        return unknown(
            message,
            "in one piece the free memory would suffice, but so little is in pieces that the GPU is full anyway",
        )
    return exposed(message, setting, advice="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts")


def expandable_setting() -> str:
    """Whether the environment sets expandable_segments. The variable's name depends on the release of torch."""
    new, old = (
        re.search(r"expandable_segments:\s*True", os.environ.get(name, "")) is not None
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    )
    if old:
        return (
            "PYTORCH_CUDA_ALLOC_CONF sets expandable_segments; torch.cuda.memory._snapshot() shows if torch uses them"
        )
    if new:
        return "only PYTORCH_ALLOC_CONF sets expandable_segments here, and torch 2.9.1 and older ignore that variable"
    return "this environment does not set expandable_segments"


def sizes(text: str) -> Optional[Dict[str, float]]:
    """In MiB: the request, the GPU's capacity, its free memory, and what torch reserved but did not allocate.

    `has_limit` is 1 if a memory fraction limits the process.
    """
    lines: List[Any] = sorted([*OLD.finditer(text), *NEW.finditer(text)], key=lambda match: match.start())
    if not lines or lines[-1].start() < text.rfind("out of memory. Allocation was preemptively rejected"):
        return None  # the last error is that of a memory fraction in torch 2.14, which has other numbers
    groups = lines[-1].groups()
    has_limit = re.search(r"[KMGT]iB allowed; |bytes allowed; ", lines[-1].group()) is not None
    mib = [float(number) * UNITS[unit] for number, unit in zip(groups[::2], groups[1::2])]
    if lines[-1].re is OLD:
        return {
            "tried": mib[0],
            "capacity": mib[1],
            "free": mib[3],
            "unallocated": mib[4] - mib[2],
            "has_limit": has_limit,
        }
    return {"tried": mib[0], "capacity": mib[1], "free": mib[2], "unallocated": mib[3], "has_limit": has_limit}


PIECES = "torch's caching allocator keeps segments that are partly in use, and the free piece of each is too small"
EXPANDABLE = "with expandable_segments:True torch uses one growing segment, and can join its free pieces"
GLIBC = "torch's caching allocator: here the heap of glibc under an address-space limit, which has the same rule"
ADJACENT = "blocks are adjacent in one heap, and every second block is in use"
HOLES = symptom(r"128 MiB are free in pieces, and less cannot be had: .*can't allocate memory: you tried to")


def of_heap(
    name: str,
    control: Callable[[Context], None],
    because: str,
    treatment: Callable[[Context], None],
    fix: str,
    releases: str = ">=2.1",
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, HOLES, because=because, fidelity="stand-in", stands_for=GLIBC),
        treatment=Arm(treatment, completed(), because=fix, fidelity="stand-in", stands_for=GLIBC),
        world_size=1,
        needs=Needs(packages={"torch": releases}),
        expected_s=(0.2, 0.2),
    )


probe = Probe(
    check=check,
    params={"log": Param("path", "a log with the out-of-memory error, in whole lines")},
    experiments=(
        Experiment(
            name="gpu",
            control=Arm(
                segments,
                symptom(r"440 MiB are free in pieces, and less cannot be had: .*Tried to allocate 300\.00 MiB"),
                because=PIECES,
                fidelity="hardware",
            ),
            treatment=Arm(
                segments,
                completed(),
                because=EXPANDABLE,
                fidelity="hardware",
                env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ),
            world_size=1,
            backend="nccl",
            needs=Needs(gpus=1, gpu_memory_mib=GPU_MIB),
            deadline_s=60,
            expected_s=(8, 8),
        ),
        of_heap(
            "heap",
            partial(heap),
            ADJACENT,
            partial(heap, returns=True),
            "each block is a separate mapping, so a free block is returned at once",
        ),
    ),
    variants=(
        of_heap(
            "same-size", partial(heap), ADJACENT, partial(heap, request=CPU_BLOCK), "the request has the size of a hole"
        ),
        of_heap(
            "longest-first",
            partial(heap, longest_first=True, request=CPU_LONGEST),
            "a smaller block uses the place of the largest block, which came first",
            partial(heap, longest_first=True, returns=True, request=CPU_LONGEST),
            "the largest block comes first too, but each block is a separate mapping",
            releases=">=2.1,!=2.5.*",  # the process of 2.5.1 finds memory elsewhere, for an unknown reason
        ),
    ),
)

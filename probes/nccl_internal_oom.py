"""NCCL's buffers do not come from torch's pool: they need memory outside the pool.

On GPUs the probe measures what NCCL allocates beside the pool, and fills nothing. On CPU two allocators share a limit
that the kernel enforces: a caching pool, as torch has one, and a library that asks the system for its buffers.
"""

import mmap
import os
import re
from collections import defaultdict
from functools import partial
from typing import Any, Dict, List, Mapping, Optional

from kb.cpu_arms import limit_address_space
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

MIB = 1 << 20


class Pool:
    """Caches freed blocks for later requests; returns them to the system only when it cannot grow itself."""

    def __init__(self, cap_mib: Optional[int]) -> None:
        self.cap_mib = cap_mib
        self.cached: List[mmap.mmap] = []
        self.used_mib = 0

    def cached_mib(self) -> int:
        return sum(len(block) for block in self.cached) // MIB

    def take(self, mib: int) -> mmap.mmap:
        fitting = [block for block in self.cached if len(block) >= mib * MIB]
        if fitting:
            block = min(fitting, key=len)
            self.cached.remove(block)
        else:
            if self.cap_mib is not None and self.used_mib + self.cached_mib() + mib > self.cap_mib:
                self.empty_cache()
            try:
                block = mmap.mmap(-1, mib * MIB)
            except OSError:  # as torch does when cudaMalloc fails for it
                self.empty_cache()
                block = mmap.mmap(-1, mib * MIB)
        self.used_mib += len(block) // MIB
        return block

    def give(self, block: mmap.mmap) -> None:
        self.used_mib -= len(block) // MIB
        self.cached.append(block)

    def empty_cache(self) -> None:
        for block in self.cached:
            block.close()
        self.cached.clear()


WAYS = ("late", "capped", "first", "emptied")


def train(ctx: Context, *, way: str) -> None:
    """Steps of growing length fill the pool; then a second process group is used for the first time."""
    assert way in WAYS, way
    limit, buffers = ctx.params["limit_mib"], ctx.params["buffers_mib"]
    limit_address_space(limit * MIB)
    pool = Pool(limit - 2 * buffers if way == "capped" else None)
    communicators = [mmap.mmap(-1, buffers * MIB)] if way == "first" else []
    weights = pool.take(limit // 8)
    for eighths in (1, 2, 3):  # longer and longer sequences: what was cached is too small each time
        activations = pool.take(eighths * limit // 8)
        activations[-1] = 1
        pool.give(activations)
    ctx.note(in_use_mib=pool.used_mib, cached_mib=pool.cached_mib(), limit_mib=limit)
    ctx.reached()
    if way == "emptied":
        pool.empty_cache()
    try:
        communicator = communicators[0] if communicators else mmap.mmap(-1, buffers * MIB)
    except OSError as error:
        raise Symptom(
            f"{buffers} MiB of communication buffers do not fit: {pool.used_mib} MiB are in use, "
            f"{pool.cached_mib()} MiB are free and held by the cache, the limit is {limit} MiB ({error.strerror})"
        ) from None
    communicator[:] = b"\1" * len(communicator)
    assert len(weights) == limit // 8 * MIB


def measure(ctx: Context) -> None:
    """Both arms are this job: what the first collective takes on the GPU, beside torch's pool."""
    import torch

    dist = ctx.init_process_group(timeout_s=60)
    x = torch.ones(1 << 18, device=ctx.device)
    torch.cuda.synchronize()
    ctx.reached()
    before, pool = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    taken = (before - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - pool)) // MIB
    assert x[0].item() == ctx.world_size
    ctx.note(taken_beside_the_pool_mib=taken, channels=os.environ.get("NCCL_MAX_NCHANNELS", "NCCL's choice"))
    if taken > ctx.params["budget_mib"]:
        raise Symptom(
            f"NCCL took {taken} MiB beside torch's pool, more than the {ctx.params['budget_mib']} MiB left for it"
        )


# --- the check: what NCCL itself logs of its memory -----------------------------------------------------------------

ALLOCATED = re.compile(
    r"(?<!\S)(\S{1,255}:\d{1,9}):\d{1,9} \[\d+\] .{0,120}?Cuda (?:Alloc|Calloc|CallocAsync) Size (\d+)"
)
SHARED = re.compile(r"(?<!\S)(\S{1,255}:\d{1,9}):\d{1,9} \[\d+\] .{0,80}?Allocated shareable buffer \S+ size (\d+)")
NVLS = re.compile(r"(?<!\S)(\S{1,255}:\d{1,9}):\d{1,9} \[\d+\] .{0,120}?nvlsTotalSize (\d+)")


def check(params: Mapping[str, Any]) -> Finding:
    """How much did NCCL take per process, by its own log, and is that more than was left?"""
    settings = [f"{name}={os.environ[name]}" for name in GROWING if name in os.environ]
    if not params["log"]:
        why = "what NCCL needs is known from a run only: it depends on GPUs, links, groups and operations"
        advice = "one run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ALLOC, then --set log=FILE --set free_mib=N"
        return unknown(why, *(f"set here, and changes it: {setting}" for setting in settings), advice=advice)
    try:
        text = params["log"].read_text(errors="replace")
    except OSError as error:
        return unknown(f"{params['log']}: {error.strerror}")
    taken: Dict[str, int] = defaultdict(int)
    patterns = [ALLOCATED, NVLS] + ([SHARED] if "P2P/CUMEM" in text else [])  # else SHARED is in ALLOCATED already
    for pattern in patterns:
        for process, size in pattern.findall(text):
            taken[process] += int(size)
    failed = re.findall(r"Failed to CUDA \w+(?: async)? (\d+) bytes", text)
    if not taken and not failed:
        return unknown(
            f"no allocation of NCCL in {params['log']}", advice="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ALLOC"
        )
    most = max(taken, key=lambda process: taken[process], default="")
    evidence = [
        f"{len(taken)} processes, most in {most}: {taken[most] // MIB} MiB logged, kernels and context not counted"
    ]
    if failed:
        evidence.append(f"{len(failed)} allocations failed, the first of {int(failed[0]) // MIB} MiB")
        if "'out of memory'" not in text:
            return unknown(*evidence, "for want of memory or by another CUDA error: no line of the log says which")
        return exposed(*evidence, advice=f"leave that much plus 500 MiB beside torch's pool: {LEAVE}")
    free = params["free_mib"]
    if free and taken[most] // MIB > free:
        return exposed(*evidence, f"only {free} MiB are left for it", advice=LEAVE)
    if not free:
        return unknown(*evidence, "--set free_mib=N compares it")
    if taken[most] // MIB + CONTEXT_MIB > free:
        return unknown(*evidence, f"{free} MiB are left for it, and for kernels, the context and groups used later on")
    return clear(*evidence, f"{free} MiB are left for it; a group that is first used later takes more")


CONTEXT_MIB = 512  # what a process takes besides the logged allocations, roughly
LEAVE = "torch.cuda.set_per_process_memory_fraction(0.9) or less at the start of every rank"
GROWING = (
    "NCCL_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_NVLS_ENABLE",
)
STANDS_FOR = "torch's caching allocator and NCCL's cudaMalloc on a GPU: two allocators under one limit of the kernel"


def beside_a_pool(name: str, way: str, because: str) -> Experiment:
    failing, passing = partial(train, way="late"), partial(train, way=way)
    fails = symptom(r"communication buffers do not fit: \d+ MiB are in use")
    taken = "the pool may take all there is, and a group is used for the first time afterwards"
    return Experiment(
        name=name,
        control=Arm(failing, fails, because=taken, fidelity="stand-in", stands_for=STANDS_FOR),
        treatment=Arm(passing, completed(), because=because, fidelity="stand-in", stands_for=STANDS_FOR),
        world_size=1,
        needs=Needs(packages={}, memory_mib=512),
        expected_s=(0.2, 0.2),
    )


probe = Probe(
    params={
        "log": Param("path", "log of all ranks with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ALLOC"),
        "free_mib": Param("int", "what is left on the GPU for NCCL, to compare the log with", 0),
        "budget_mib": Param("int", "GPU experiment: more than this beside torch's pool is the symptom", 300),
        "limit_mib": Param("int", "CPU experiment: the limit that both allocators share", 256),
        "buffers_mib": Param("int", "CPU experiment: what the communication library asks for", 40),
    },
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                measure,
                expect=symptom(r"NCCL took \d+ MiB beside torch's pool"),
                because="NCCL chooses the number of channels, each with its own buffers",
                fidelity="hardware",
            ),
            treatment=Arm(
                measure,
                expect=completed(),
                because="NCCL_MAX_NCHANNELS=1: the buffers of one channel only",
                fidelity="hardware",
                env={"NCCL_MAX_NCHANNELS": "1"},
            ),
            backend="nccl",
            needs=Needs(gpus=2, gpu_memory_mib=3072),
            deadline_s=90,
            settle_s=3,
            expected_s=(15, 15),
        ),
        beside_a_pool(
            "two-allocators", "capped", "the pool is capped below the limit, and empties its cache at the cap"
        ),
    ),
    variants=(
        beside_a_pool("groups-first", "first", "the group is used before the pool grows, which then empties its cache"),
        beside_a_pool("empty-cache", "emptied", "the cache is emptied just before the group is used"),
    ),
)

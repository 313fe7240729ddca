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

# Where cuMem is off, "Cuda Calloc" of the same address comes before "Allocated shareable buffer".
TAKEN = re.compile(
    r"Cuda (?:Alloc|Calloc|CallocAsync) Size (?P<size>\d+) pointer (?P<at>\S+)"
    r"|Allocated shareable buffer (?P<shared_at>\S+) size (?P<shared>\d+)"
    r"|NVLS comm (?P<comm>\S+) .{0,120}nvlsTotalSize (?P<nvls>\d+)"
)
OUT = re.compile(r"^(?!.*NCCL INFO).*Cuda failure (?:2 )?'out of memory'", re.MULTILINE)
IN_HOST_MEMORY = re.compile(r"\bshm\.cc:\d+ (?:\(\w+\) )?-> ")
LARGEST = 8 * MIB  # characters of a log that are read
GRAIN = 2 * MIB  # what cuMem rounds up to


def allocations(text: str) -> Dict[str, Dict[str, int]]:
    """For each process the size of what it took, by address: one that is used again is counted once."""
    taken: Dict[str, Dict[str, int]] = defaultdict(dict)
    for line in text.splitlines():
        head, _, rest = line.partition(" NCCL INFO ")  # host:process:thread [device]
        found, words = TAKEN.search(rest), head.split()
        if found and len(words) > 1:
            size = int(found["size"] or found["shared"] or found["nvls"])
            sizes = taken[words[-2].rpartition(":")[0]]
            address = found["at"] or found["shared_at"] or found["comm"]
            sizes[address] = max(size, sizes.get(address, 0))
    return taken


def check(params: Mapping[str, Any]) -> Finding:
    """How much did NCCL take per process, by its own log, and is that more than was left?"""
    settings = [f"{name}={os.environ[name]}" for name in GROWING if name in os.environ]
    if not params["log"]:
        why = "what NCCL needs is known from a run only: it depends on GPUs, links, groups and operations"
        advice = "one run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ALLOC, then --set log=FILE --set free_mib=N"
        return unknown(why, *(f"set here, and changes it: {setting}" for setting in settings), advice=advice)
    try:
        with open(params["log"], errors="replace") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        return unknown(f"{params['log']}: {error.strerror}")
    taken = allocations(text)
    failed = re.findall(r"Failed to CUDA (?:malloc|calloc|calloc async) (\d+) bytes", text)
    is_out = OUT.search(text) is not None
    if not taken and not failed and not is_out:
        return unknown(f"no allocation of NCCL in {params['log']}", advice=LOG_ALL)
    evidence: List[str] = []
    if len(text) > LARGEST:
        evidence.append(f"only the first {LARGEST // MIB} MiB of the log were read: give the log of one rank")
    logged = held = 0
    if taken:
        most = max(taken, key=lambda process: sum(taken[process].values()))
        sizes = taken[most].values()
        logged, held = sum(sizes) // MIB, sum(-(-size // GRAIN) * GRAIN for size in sizes) // MIB
        rounded = f"{logged} MiB logged, up to {held} MiB as the driver rounds up"
        evidence.append(f"{len(taken)} processes, most in {most}: {rounded}, kernels and context not counted")
    if failed:
        evidence.append(f"{len(failed)} allocations failed, the first of {int(failed[0]) // MIB} MiB")
    if is_out and IN_HOST_MEMORY.search(text):
        return exposed(*evidence, "out of memory, in shm.cc: host memory", advice="NCCL_CUMEM_HOST_ENABLE=0")
    if is_out:
        return exposed(*evidence, "NCCL ran out of memory", advice=f"leave more beside torch's pool: {LEAVE}")
    if failed:
        return unknown(*evidence, "for want of memory or by another CUDA error: no line of the log says which")
    free = params["free_mib"]
    if not free or free < 0:
        return unknown(*evidence, "--set free_mib=N compares it")
    if logged > free:
        return exposed(*evidence, f"only {free} MiB are left for it", advice=LEAVE)
    if not re.search(r"NCCL INFO .*Cuda (?:Alloc|Calloc|CallocAsync) Size", text):
        return unknown(*evidence, "without ALLOC the log names NVLink SHARP's part alone", advice=LOG_ALL)
    if len(text) > LARGEST or held + CONTEXT_MIB > free:
        return unknown(*evidence, f"{free} MiB are left for it, and for kernels, the context and groups used later on")
    return clear(*evidence, f"{free} MiB are left for it; a group that is first used later takes more")


LOG_ALL = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ALLOC"
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

"""NCCL does not allocate its buffers from torch's pool, so they need memory outside the pool.

On GPUs, the probe measures what NCCL allocates outside the pool; it does not fill the GPU. On the CPU, two allocators
share a limit that the kernel enforces: a caching pool like torch's, and a library that allocates from the system.
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
    """Keeps freed blocks for later requests; returns them to the system only if the pool itself cannot grow."""

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
            except OSError:  # torch does the same if its own cudaMalloc fails
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
    """Fills the pool with steps of growing length, then uses another process group for the first time.

    `way` is one of WAYS: the pool is uncapped ("late"), capped, emptied before, or the group is used first.
    """
    assert way in WAYS, way
    limit, buffers = ctx.params["limit_mib"], ctx.params["buffers_mib"]
    limit_address_space(limit * MIB)
    pool = Pool(limit - 2 * buffers if way == "capped" else None)
    communicators = [mmap.mmap(-1, buffers * MIB)] if way == "first" else []
    weights = pool.take(limit // 8)
    for eighths in (1, 2, 3):  # the sequences grow, so each cached block is too small for the next step
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
    """Measures the GPU memory that the first collective takes outside torch's pool."""
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


# --- the check: the allocations in NCCL's log ------------------------------------------------------------------------

# Without cuMem, NCCL logs "Cuda Calloc" and then "Allocated shareable buffer" for the same address.
TAKEN = re.compile(
    r"Cuda (?:Alloc|Calloc|CallocAsync) Size (?P<size>\d+) pointer (?P<at>\S+)"
    r"|Allocated shareable buffer (?P<shared_at>\S+) size (?P<shared>\d+)"
    r"|NVLS comm (?P<comm>\S+) .{0,120}nvlsTotalSize (?P<nvls>\d+)"
)
OUT = re.compile(r"^(?!.*NCCL INFO).*Cuda failure (?:2 )?'out of memory'", re.MULTILINE)
IN_HOST_MEMORY = re.compile(r"\bshm\.cc:\d+ (?:\(\w+\) )?-> ")
LARGEST = 8 * MIB  # kb reads so many characters of a log
GRAIN = 2 * MIB  # cuMem rounds sizes up to a multiple of this


def allocations(text: str) -> Dict[str, Dict[str, int]]:
    """Returns, by process and address, the bytes that NCCL allocated; a reused address counts once."""
    taken: Dict[str, Dict[str, int]] = defaultdict(dict)
    for line in text.splitlines():
        head, _, rest = line.partition(" NCCL INFO ")  # host:process:thread [device]
        match, words = TAKEN.search(rest), head.split()
        if match and len(words) > 1:
            size = int(match["size"] or match["shared"] or match["nvls"])
            sizes = taken[words[-2].rpartition(":")[0]]
            address = match["at"] or match["shared_at"] or match["comm"]
            sizes[address] = max(size, sizes.get(address, 0))
    return taken


def check(params: Mapping[str, Any]) -> Finding:
    """How much memory did NCCL take per process according to its log, and is that more than was free?"""
    settings = [f"{name}={os.environ[name]}" for name in GROWING if name in os.environ]
    if not params["log"]:
        why = "only a run shows how much NCCL needs: it depends on GPUs, links, groups and operations"
        advice = f"run the job once with {LOG_ALL}, then run --set log=FILE --set free_mib=N"
        return unknown(why, *(f"this variable changes it: {setting}" for setting in settings), advice=advice)
    try:
        with open(params["log"], errors="replace") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        return unknown(f"{params['log']}: {error.strerror}")
    taken = allocations(text)
    failed = re.findall(r"Failed to CUDA (?:malloc|calloc|calloc async) (\d+) bytes", text)
    is_out = OUT.search(text) is not None
    if not taken and not failed and not is_out:
        return unknown(f"{params['log']} has no allocation of NCCL", advice=f"run the job with {LOG_ALL}")
    evidence: List[str] = []
    logged = held = 0
    if len(text) > LARGEST:
        evidence.append(f"kb read only the first {LARGEST // MIB} MiB of the log: give it the log of one rank")
    if taken:
        most = max(taken, key=lambda process: sum(taken[process].values()))
        sizes = taken[most].values()
        logged, held = sum(sizes) // MIB, sum(-(-size // GRAIN) * GRAIN for size in sizes) // MIB
        rounded = f"it logged {logged} MiB, up to {held} MiB after rounding by the driver"
        evidence.append(f"processes in the log: {len(taken)}; {most} took most: {rounded}, without kernels and context")
    if failed:
        evidence.append(f"failed allocations: {len(failed)}; the first was of {int(failed[0]) // MIB} MiB")
    if is_out and IN_HOST_MEMORY.search(text):
        return exposed(*evidence, "NCCL ran out of host memory, in shm.cc", advice="set NCCL_CUMEM_HOST_ENABLE=0")
    if is_out:
        return exposed(*evidence, "NCCL ran out of memory", advice=f"leave more memory outside torch's pool: {LEAVE}")
    if failed:
        return unknown(*evidence, "the log does not say whether memory ran out or another CUDA error occurred")
    sizes_are_logged = bool(re.search(r"NCCL INFO .*Cuda (?:Alloc|Calloc|CallocAsync) Size", text))
    ranks = max(map(int, re.findall(r"NCCL INFO .{0,200}\bn[rR]anks (\d{1,6})\b", text)), default=0)
    if ranks > len(taken):
        evidence.append(f"the largest communicator has {ranks} ranks, so others may have taken more")
    is_complete = sizes_are_logged and len(text) <= LARGEST and 0 < ranks <= len(taken)
    return compare(evidence, logged, held, params["free_mib"], sizes_are_logged, is_complete)


def compare(
    evidence: List[str], logged: int, held: int, free: int, sizes_are_logged: bool, is_complete: bool
) -> Finding:
    """Compares what NCCL took with the `free` memory; `logged`, `held` (after rounding) and `free` are in MiB."""
    if not free or free < 0:
        advice = "run --set log=FILE --set free_mib=N, with the MiB that are free for NCCL"
        return unknown(*evidence, "the free memory was not given", advice=advice)
    if logged > free:
        return exposed(*evidence, f"only {free} MiB are free for NCCL", advice=LEAVE)
    if not sizes_are_logged:
        return unknown(
            *evidence,
            "without ALLOC, the log has only the buffers of NVLink SHARP",
            advice=f"run the job with {LOG_ALL}",
        )
    if not is_complete or held + CONTEXT_MIB > free:
        return unknown(
            *evidence, f"{free} MiB are free for NCCL, its kernels, the context and groups that are used later"
        )
    return clear(*evidence, f"{free} MiB are free for NCCL; a group that is first used later takes more")


LOG_ALL = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ALLOC"
CONTEXT_MIB = 512  # roughly what a process takes besides the logged allocations
LEAVE = "call torch.cuda.set_per_process_memory_fraction(0.9), or less, at the start of every rank"
GROWING = (
    "NCCL_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_NVLS_ENABLE",
)
STANDS_FOR = "torch's caching allocator and NCCL's cudaMalloc on a GPU; two allocators share a limit of the kernel"


def beside_a_pool(name: str, way: str, because: str) -> Experiment:
    """Returns an experiment whose treatment arm trains in this `way`."""
    failing, passing = partial(train, way="late"), partial(train, way=way)
    fails = symptom(r"communication buffers do not fit: \d+ MiB are in use")
    uncapped = "the pool may take all memory, and a group is used for the first time afterwards"
    return Experiment(
        name=name,
        control=Arm(failing, fails, because=uncapped, fidelity="stand-in", stands_for=STANDS_FOR),
        treatment=Arm(passing, completed(), because=because, fidelity="stand-in", stands_for=STANDS_FOR),
        world_size=1,
        needs=Needs(packages={}, memory_mib=512),
        expected_s=(0.2, 0.2),
    )


probe = Probe(
    params={
        "log": Param("path", "log of all ranks with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ALLOC"),
        "free_mib": Param("int", "MiB that are free for NCCL on the GPU, to compare with the log", 0),
        "budget_mib": Param("int", "GPU experiment: more MiB than this outside torch's pool are the symptom", 300),
        "limit_mib": Param("int", "CPU experiment: the limit in MiB that both allocators share", 256),
        "buffers_mib": Param("int", "CPU experiment: MiB that the communication library requests", 40),
    },
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                measure,
                expect=symptom(r"NCCL took \d+ MiB beside torch's pool"),
                because="NCCL chooses the number of channels, and each channel has its own buffers",
                fidelity="hardware",
            ),
            treatment=Arm(
                measure,
                expect=completed(),
                because="with NCCL_MAX_NCHANNELS=1, NCCL allocates the buffers of one channel",
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
            "two-allocators", "capped", "the pool is capped below the limit and empties its cache at the cap"
        ),
    ),
    variants=(
        beside_a_pool(
            "groups-first", "first", "the group is used before the pool grows, and the pool empties its cache later"
        ),
        beside_a_pool("empty-cache", "emptied", "the cache is emptied just before the group is used"),
    ),
)

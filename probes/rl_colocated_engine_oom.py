"""Engine and trainer share a GPU: the engine wakes and needs the memory that the trainer's pool still holds.

Without a GPU, a limit of the address space stands for the GPU, a list of freed blocks for torch's pool, and `mmap` for
the driver call with which the engine allocates outside the pool. The probe does not start an engine.
"""

from __future__ import annotations

import gc
import mmap
import re
import resource
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    symptom,
    unknown,
)

MIB = 1 << 20
CARD = 240  # MiB that the process may still allocate
BLOCK = 16  # MiB
STEP, STATES, GATHERED = 9, 7, 6  # blocks: a training step, the weights and states in it, a transfer
WEIGHTS, KV_CACHE, SMALL_KV_CACHE = 64, 96, 8  # MiB, of the engine
GPU_POOL, GPU_SPARE = 512 * MIB, 256 * MIB


class Pool:
    """The trainer's memory pool: it keeps freed blocks for the next request, like torch's caching allocator."""

    def __init__(self) -> None:
        self.unused: List[mmap.mmap] = []

    def take(self, count: int) -> List[mmap.mmap]:
        return [self.unused.pop() if self.unused else mmap.mmap(-1, BLOCK * MIB) for _ in range(count)]

    def free(self, blocks: List[mmap.mmap]) -> None:
        self.unused += blocks
        blocks.clear()

    def empty_cache(self) -> None:
        self.unused.clear()  # this unmaps the blocks


class Engine:
    """A sleeping engine: it knows the sizes of its parts and maps them again when it wakes."""

    def __init__(self, kv_cache: int = KV_CACHE) -> None:
        self.parts = {"weights": WEIGHTS, "kv_cache": kv_cache}
        self.mapped: Dict[str, mmap.mmap] = {}

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        for tag in tags:
            try:
                self.mapped[tag] = mmap.mmap(-1, self.parts[tag] * MIB)
            except OSError as error:
                raise Symptom(f"the engine cannot map its {tag} again, {self.parts[tag]} MiB: {error}") from error


def share_card(kv_cache: int = KV_CACHE) -> Tuple[Pool, Engine]:
    """Limits the process to `CARD` MiB more than it has; returns the trainer's pool and the engine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + CARD * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return Pool(), Engine(kv_cache)


def wake(ctx: Context, *, empties: bool = False, kv_cache: int = KV_CACHE) -> None:
    """Wakes the engine after a training step has freed its tensors; `empties` empties the pool first."""
    if ctx.backend == "nccl":
        wake_on_gpu(ctx, empties=empties)
        return
    pool, llm = share_card(kv_cache)
    pool.free(pool.take(STEP))
    ctx.reached()
    if empties:
        pool.empty_cache()
    llm.wake_up()
    assert len(llm.mapped["kv_cache"]) == kv_cache * MIB


def wake_beside_states(ctx: Context, *, offloads: bool) -> None:
    """Wakes the engine after the pool was emptied; the trainer's states stay in use, unless it `offloads` them."""
    pool, llm = share_card()
    states = pool.take(STATES)
    pool.free(pool.take(STEP - STATES))
    ctx.reached()
    if offloads:
        pool.free(states)
    pool.empty_cache()
    llm.wake_up()
    assert set(llm.mapped) == {"weights", "kv_cache"} and bool(states) is not offloads


def wake_in_parts(ctx: Context, *, parts: bool = True, empties: bool = True) -> None:
    """Wakes the engine and sends it new weights, for which the trainer gathers its parameters.

    With `parts` the KV cache wakes after the transfer; with `empties` the pool is emptied before that.
    """
    pool, llm = share_card()

    def send_weights(llm: Engine) -> None:
        gathered = pool.take(GATHERED)
        gathered[0][:7] = b"updated"
        if not parts:
            llm.wake_up(tags=["kv_cache"])
        llm.mapped["weights"][:7] = gathered[0][:7]
        pool.free(gathered)

    ctx.reached()
    llm.wake_up(tags=["weights"])
    send_weights(llm)
    if empties:
        pool.empty_cache()
    if parts:
        llm.wake_up(tags=["kv_cache"])
    assert llm.mapped["weights"][:7] == b"updated" and "kv_cache" in llm.mapped


def wake_on_gpu(ctx: Context, *, empties: bool) -> None:
    """Does the same with torch's pool on a GPU; instead of an engine, it compares the share with the free memory."""
    import torch

    torch.ones(1, device=ctx.device)  # this creates the context and the first segment
    share = int(torch.cuda.mem_get_info()[0]) - GPU_SPARE
    torch.empty(GPU_POOL, dtype=torch.uint8, device=ctx.device)
    ctx.reached()
    if empties:
        gc.collect()
        torch.cuda.empty_cache()
    free = int(torch.cuda.mem_get_info()[0])
    if free < share:
        raise Symptom(f"the engine cannot map its share again, {share // MIB} MiB: the driver has {free // MIB} MiB")


NUMBER = r"(\d+(?:\.\d+)?)"
SLEEP = re.compile(rf"Sleep mode freed {NUMBER} GiB memory, {NUMBER} GiB memory is still in use")
PROCESS = re.compile(r"pid=\d+(?:, ip=[\d.]+)?|\[?rank ?\d+\]?")
UNNAMED = "lines that name no process"


def read_sleeps(log: Path) -> Dict[str, List[Tuple[float, float]]]:
    """Returns (GiB freed, GiB still in use) of each sleep, by process. Raises OSError if `log` cannot be read."""
    sleeps: Dict[str, List[Tuple[float, float]]] = {}
    if not log.is_file():
        raise OSError(f"{log} is no regular file")
    with open(log, encoding="utf-8", errors="replace") as file:
        for line in islice(iter(lambda: file.readline(10_000), ""), 300_000):  # so many lines take a second
            if found := SLEEP.search(line):
                process = PROCESS.search(line)
                name = process.group() if process else UNNAMED
                sleeps.setdefault(name, []).append((float(found.group(1)), float(found.group(2))))
    return sleeps


def check(params: Mapping[str, Any]) -> Finding:
    """Do the lines that vLLM logs at each sleep show that it freed nothing, or that memory in use grows?"""
    if params["log"] is None:
        return unknown("no log was given", advice="run --set log=train.log, with a log that has vLLM's INFO lines")
    try:
        sleeps = read_sleeps(params["log"])
    except OSError as error:
        return unknown(f"kb cannot read the log: {error}")
    evidence: List[str] = []
    uncertain: List[str] = []
    for name, pairs in sleeps.items():
        freed, left = pairs[-1]
        known = evidence if name != UNNAMED or all(pair[0] < 0.01 for pair in pairs) else uncertain
        if freed < 0.01 and len(pairs) > 1 and left > params["growth_gib"]:
            known.append(f"{name}: the last sleep freed nothing, and {left} GiB of the GPU are in use")
        known = evidence if name != UNNAMED else uncertain
        if len(pairs) > 2 and left - pairs[1][1] > params["growth_gib"]:
            known.append(f"{name}: {pairs[1][1]} GiB were in use after its second sleep, {left} after its last")
    if evidence:
        return exposed(
            *evidence,
            advice="log torch.cuda.memory_reserved() in the trainer as well, to see which process holds the memory",
        )
    if uncertain:
        return unknown(*uncertain, "these lines may come from several processes, each with its own GPU")
    count = sum(map(len, sleeps.values()))
    return unknown(f"the log has {count} sleeps: all freed memory, and memory in use did not grow after the second")


STANDS_FOR = "a GPU (a limit of the address space), torch's pool (a list of blocks), cuMemCreate of the engine (mmap)"
PATTERN = r"the engine cannot map its (weights|kv_cache|share) again, \d+ MiB"


def shared(
    name: str, fails: Callable[[Context], None], works: Callable[[Context], None], because: Tuple[str, str]
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, symptom(PATTERN), because[0], "stand-in", STANDS_FOR),
        treatment=Arm(works, completed(), because[1], "stand-in", STANDS_FOR),
        world_size=1,
        needs=Needs(packages={}),
    )


because = (
    "the trainer's pool keeps the memory that the step freed",
    "the trainer empties the pool before the engine wakes",
)
pool = shared("pool", wake, partial(wake, empties=True), because)

probe = Probe(
    check=check,
    params={
        "log": Param("path", "a log of the run with the lines that vLLM prints when it sleeps, for the check"),
        "growth_gib": Param("float", "how many GiB more than after the second sleep count as growth", 2.0),
    },
    experiments=(pool.on_gpus(gpus=1, name="gpu", needs=Needs(gpus=1)), pool),
    variants=(
        shared(
            "share",
            wake,
            partial(wake, kv_cache=SMALL_KV_CACHE),
            ("the engine needs a KV cache of 96 MiB", "the engine needs a KV cache of 8 MiB"),
        ),
        shared(
            "live",
            partial(wake_beside_states, offloads=False),
            partial(wake_beside_states, offloads=True),
            ("the trainer empties the pool, but keeps its states", "the trainer offloads its states first"),
        ),
        shared(
            "parts",
            partial(wake_in_parts, parts=False),
            wake_in_parts,
            ("the KV cache wakes before the transfer ends", "the KV cache wakes last"),
        ),
        shared(
            "second-wake",
            partial(wake_in_parts, empties=False),
            wake_in_parts,
            ("the pool holds the freed parameters when the KV cache wakes", "the trainer empties the pool again"),
        ),
    ),
)

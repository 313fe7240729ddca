"""Engine and trainer share a card: the engine maps its share again while the trainer's pool still has the memory.

Without a GPU an address space limit is the card, a list of freed blocks is torch's pool, and `mmap` is the call by
which the engine takes memory past that pool. An engine itself is not started.
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
CARD = 240  # MiB that the process may still take
BLOCK = 16  # MiB
STEP, STATES, GATHERED = 9, 7, 6  # blocks: what a step takes, of it weights and states; what a transfer takes
WEIGHTS, KV_CACHE, SMALL_KV_CACHE = 64, 96, 8  # MiB of the engine
GPU_POOL, GPU_SPARE = 512 * MIB, 256 * MIB


class Pool:
    """The trainer's memory: what is freed stays here for the next request, as in torch's caching allocator."""

    def __init__(self) -> None:
        self.unused: List[mmap.mmap] = []

    def take(self, count: int) -> List[mmap.mmap]:
        return [self.unused.pop() if self.unused else mmap.mmap(-1, BLOCK * MIB) for _ in range(count)]

    def free(self, blocks: List[mmap.mmap]) -> None:
        self.unused += blocks
        blocks.clear()

    def empty_cache(self) -> None:
        self.unused.clear()  # the kernel has them back


class Engine:
    """An engine that sleeps: it knows the sizes of its parts and maps them again when it wakes."""

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
    """From here on the process may take `CARD` more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + CARD * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return Pool(), Engine(kv_cache)


def wake(ctx: Context, *, empties: bool = False, kv_cache: int = KV_CACHE) -> None:
    """A training step has ended and freed its tensors; the engine wakes for the next rollout."""
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
    """The pool is emptied in both arms; the trainer's weights and optimizer states stay in use, or are offloaded."""
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
    """The engine gets new weights, for which the trainer gathers its parameters once more."""
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
    """The same with torch's pool on a GPU; the engine is what it would ask the driver for."""
    import torch

    torch.ones(1, device=ctx.device)  # the context and the first segment are there
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
    """What was freed and what stayed in use, sleep by sleep, for each process. Raises OSError."""
    sleeps: Dict[str, List[Tuple[float, float]]] = {}
    if not log.is_file():
        raise OSError(f"{log} is no regular file")
    with open(log, encoding="utf-8", errors="replace") as file:
        for line in islice(iter(lambda: file.readline(10_000), ""), 300_000):  # within a second
            if found := SLEEP.search(line):
                process = PROCESS.search(line)
                name = process.group() if process else UNNAMED
                sleeps.setdefault(name, []).append((float(found.group(1)), float(found.group(2))))
    return sleeps


def check(params: Mapping[str, Any]) -> Finding:
    """Read in a log what vLLM says at each sleep: nothing freed, or more in use from step to step."""
    if params["log"] is None:
        return unknown("no log was given to read", advice="--set log=train.log, a log with vLLM's lines at INFO")
    try:
        sleeps = read_sleeps(params["log"])
    except OSError as error:
        return unknown(f"the log cannot be read: {error}")
    evidence: List[str] = []
    uncertain: List[str] = []
    for name, pairs in sleeps.items():
        freed, left = pairs[-1]
        known = evidence if name != UNNAMED or all(pair[0] < 0.01 for pair in pairs) else uncertain
        if freed < 0.01 and len(pairs) > 1 and left > params["growth_gib"]:
            known.append(f"{name}: the last sleep freed nothing, {left} GiB of the card are in use")
        known = evidence if name != UNNAMED else uncertain
        if len(pairs) > 2 and left - pairs[1][1] > params["growth_gib"]:
            known.append(f"{name}: {pairs[1][1]} GiB in use after its second sleep, {left} after its last")
    if evidence:
        return exposed(*evidence, advice="log torch.cuda.memory_reserved() of the trainer beside it: whose is it?")
    if uncertain:
        return unknown(*uncertain, "these may be several processes, each with a card of its own")
    count = sum(map(len, sleeps.values()))
    return unknown(f"{count} sleeps in the log, none frees nothing and none leaves more than the second did")


STANDS_FOR = "the card: an address space limit; torch's pool: a list of freed blocks; the engine's cuMemCreate: mmap"
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


because = ("the trainer's pool keeps what the step has freed", "the pool is emptied before the engine wakes")
pool = shared("pool", wake, partial(wake, empties=True), because)

probe = Probe(
    check=check,
    params={
        "log": Param("path", "a log of the run, with the lines that vLLM prints when it sleeps"),
        "growth_gib": Param("float", "so much more in use after a sleep than after the second is growth", 2.0),
    },
    experiments=(pool.on_gpus(gpus=1, name="gpu", needs=Needs(gpus=1)), pool),
    variants=(
        shared("share", wake, partial(wake, kv_cache=SMALL_KV_CACHE), ("a KV cache of 96 MiB", "one of 8 MiB")),
        shared(
            "live",
            partial(wake_beside_states, offloads=False),
            partial(wake_beside_states, offloads=True),
            ("the pool is emptied, and what the trainer uses stays", "the trainer's states leave the card first"),
        ),
        shared(
            "parts", partial(wake_in_parts, parts=False), wake_in_parts, ("all wakes before the end", "KV cache last")
        ),
        shared(
            "second-wake",
            partial(wake_in_parts, empties=False),
            wake_in_parts,
            ("the freed parameters are in the pool when the KV cache wakes", "the pool is emptied once more"),
        ),
    ),
)

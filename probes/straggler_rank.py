"""Two ranks train with DDP; one needs longer in each step, and the other waits. A sleep makes the time per sample."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import time
from functools import partial
from typing import Any, Callable, List, Mapping, Sequence

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

STEPS, GLOBAL_BATCH, WAITING = 5, 8, 0.4
SAMPLE_S = 0.02  # on the fast rank; the slow rank needs three times as long


def time_ranks(model: Any, compute: Callable[[Any], None], batches: Any, device: Any) -> List[List[float]]:
    """For each rank, the mean seconds in a step that it computes, and that it waits for the others."""
    import torch
    import torch.distributed as dist

    synchronize = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    own = wait = 0.0
    for batch in batches:
        dist.barrier()
        synchronize()
        started = time.perf_counter()
        with model.no_sync():
            compute(batch)
        synchronize()
        computed = time.perf_counter()
        dist.barrier()
        synchronize()
        own += computed - started
        wait += time.perf_counter() - computed
    mine = torch.tensor([own, wait], device=device) / len(batches)
    ranks = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    model.zero_grad()
    return [rank.tolist() for rank in ranks]


def shared_batches(samples: int, shares: Sequence[int], rank: int, epoch: int) -> List[List[int]]:
    """Gives this rank `shares[rank]` of each `sum(shares)` samples, so that all ranks have equally many batches."""
    order = list(range(samples))
    random.Random(epoch).shuffle(order)
    first, size = sum(shares[:rank]), sum(shares)
    return [order[start + first : start + first + shares[rank]] for start in range(0, samples - size + 1, size)]


def alike_batches(lengths: list[int], size: int, ranks: int, rank: int, epoch: int) -> list[list[int]]:
    """All ranks get samples of about one length in one step; the order of the steps is random."""
    chance = random.Random(epoch)
    order = chance.sample(range(len(lengths)), len(lengths) // (size * ranks) * (size * ranks))
    order.sort(key=lambda index: lengths[index])
    steps = [order[start : start + size * ranks] for start in range(0, len(order), size * ranks)]
    chance.shuffle(steps)
    return [step[rank::ranks] for step in steps]


def train(
    ctx: Context,
    *,
    slow: float = 3.0,
    shares: Sequence[int] = (4, 4),
    weighted: bool = True,
    extra_every: int = 0,
    accumulation: int = 1,
    num_workers: int = 0,
    timeout_s: float = 20,
) -> None:
    """Rank 1 needs `slow` times as long per sample; every `extra_every` steps rank 0 does extra work."""
    import torch
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    dist = ctx.init_process_group(timeout_s=timeout_s)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to(ctx.device))
    inputs = torch.randn(STEPS * GLOBAL_BATCH, 2)
    samples = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)
    batches: Any = shared_batches(len(samples), shares, ctx.rank, epoch=0)
    fork = "fork" if num_workers else None
    loader: Any = DataLoader(samples, batch_sampler=batches, num_workers=num_workers, multiprocessing_context=fork)
    done = itertools.count(1)

    def loss_of(batch: Any) -> Any:
        x, y = (part.to(ctx.device) for part in batch)
        time.sleep(SAMPLE_S / accumulation * len(x) * (slow if ctx.rank == 1 else 1))
        loss = mse_loss(model(x), y)
        if weighted:
            loss = loss * len(x) * dist.get_world_size() / sum(shares)
        return loss / accumulation

    def compute(batch: Any) -> None:
        for _ in range(accumulation):
            loss_of(batch).backward()
        if extra_every and next(done) % extra_every == 0 and ctx.rank == 0:
            time.sleep(0.12)  # as for writing an image, copying the weights, or a request to a server

    first = next(iter(loader))
    for _ in range(2):  # DDP rebuilds its buckets before the second step, which needs communication
        loss_of(first).backward()
    ctx.reached()
    if shares[0] != shares[1]:
        model.zero_grad()
        loss_of(first).backward()
        compare_gradient(ctx, model, samples, shares)
    judge(ctx, lambda: time_ranks(model, compute, loader, ctx.device))


def compare_gradient(ctx: Context, model: Any, samples: Any, shares: Sequence[int]) -> None:
    """Raises `Symptom` if the gradient of the first step is not that of one process with the samples of all ranks."""
    import torch
    from torch.nn.functional import mse_loss

    whole = shared_batches(len(samples), [sum(shares)], 0, epoch=0)[0]
    x, y = (part[whole].to(ctx.device) for part in samples.tensors)
    expected = torch.autograd.grad(mse_loss(model.module(x), y), model.module.weight)[0]
    error = ((model.module.weight.grad - expected).norm() / expected.norm()).item()
    if error > 0.02:
        raise Symptom("the gradient of %s samples is %.0f %% off that of one process" % (list(shares), 100 * error))
    assert error < 1e-5, error


def train_on_lengths(ctx: Context, *, alike: bool) -> None:
    """Trains on sequences of two lengths; a batch takes as long as its longest sequence."""
    import torch

    torch.set_num_threads(1)
    ctx.init_process_group(timeout_s=20)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to(ctx.device))
    lengths = [1, 1, 1, 10] * 8
    mixed = shared_batches(len(lengths), [2, 2], ctx.rank, epoch=0)
    batches = alike_batches(lengths, 2, 2, ctx.rank, epoch=0) if alike else mixed

    def compute(batch: Sequence[int]) -> None:
        time.sleep(SAMPLE_S * max(lengths[index] for index in batch))
        model(torch.ones(len(batch), 2, device=ctx.device)).sum().backward()

    for _ in range(2):
        compute(batches[0])
    ctx.reached()
    judge(ctx, lambda: time_ranks(model, compute, batches, ctx.device))


def judge(ctx: Context, measure: Callable[[], List[List[float]]]) -> None:
    """Raises `Symptom` if a rank waits much of a step in three measurements; a busy machine may spoil one or two."""
    for _ in range(3):
        ranks = measure()
        ctx.note(own_and_wait_ms=[[round(1000 * seconds) for seconds in rank] for rank in ranks])
        if max(wait / (own + wait) for own, wait in ranks) <= WAITING:
            return
    slowest = min(range(len(ranks)), key=lambda rank: ranks[rank][1])
    assert ranks[slowest] == max(ranks), ranks
    numbers = ", ".join("rank %d works %.3f s and waits %.3f s" % (r, *ranks[r]) for r in range(len(ranks)))
    raise Symptom("%s in a step: rank %d waits least, and the others wait for it" % (numbers, slowest))


def check(params: Mapping[str, Any]) -> Finding:
    """Compares the models of the GPUs of this machine; it cannot see their speed under load, nor other machines."""
    if params["ranks"] == 1:
        return clear("a job of one rank waits for no other rank")
    try:
        text = subprocess.run(["nvidia-smi", "-L"], capture_output=True, errors="replace", timeout=3, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        text = ""
    names = re.findall(r"^GPU \d+: (.+?) \(UUID: ", text, re.M)
    if not names or any("rror" in name for name in names):
        return unknown("nvidia-smi does not name the GPUs of this machine", advice="run this on each node of the job")
    evidence = ["%d x %s" % (names.count(name), name) for name in sorted(set(names))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if "MIG" in text or (visible is not None and len(evidence) > 1):
        advice = "compare torch.cuda.get_device_name() of all ranks: CUDA may number the cards in another order"
        why = "the job may use only some of these GPUs, or parts of them, because of CUDA_VISIBLE_DEVICES or MIG"
        return unknown(*evidence, why, advice=advice)
    if len(evidence) > 1:
        advice = "use cards of one model, or give the slower ones fewer samples and weight the loss"
        return exposed("a job on all GPUs of this machine has cards of different models:", *evidence, advice=advice)
    why = "kb cannot see the speed under load, nor other nodes"
    return unknown(*evidence, why, advice="time the ranks, as `How to tell` of the entry describes")


SLEEP = "a slower card, or a rank with more work; a sleep for each sample takes the time"
WAITS = r"rank 0 works \d\.\d+ s and waits \S+ s, rank 1 works \d\.\d+ s and waits \S+ s in a step: rank %s waits least"
ZERO, ONE, ANY = (symptom(WAITS % rank) for rank in ("0", "1", r"\d"))


def experiment(name: str, job: Any, change: Mapping[str, Any], because: str, fix: str, expect: Any = ONE) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(job, expect, because, "stand-in", SLEEP),
        treatment=Arm(partial(job, **change), completed(), fix, "stand-in", SLEEP),
        deadline_s=60,
        expected_s=(5.0, 2.0),
    )


SLOW = "rank 1 needs three times as long per sample, and both ranks have four samples in a step"
straggler = experiment("slow", train, {"slow": 1.0}, SLOW, "rank 1 is as fast as rank 0")

probe = Probe(
    check=check,
    params={"ranks": Param("int", "number of ranks of the job, for the check")},
    experiments=(straggler.on_gpus(), straggler),
    variants=(
        experiment(
            "split", train, {"shares": (6, 2)}, SLOW, "rank 0 has six of eight samples, and the loss is weighted"
        ),
        experiment(
            "weights",
            partial(train, shares=(6, 2), weighted=False),
            {"weighted": True},
            "DDP averages over ranks, so a sample of rank 1, which has fewer, counts three times as much",
            "each rank multiplies its loss by its samples x ranks / samples of all ranks",
            symptom(r"the gradient of \[6, 2\] samples is \d+ % off that of one process"),
        ),
        experiment(
            "rank-zero",
            partial(train, slow=1.0, extra_every=1),
            {"extra_every": STEPS},
            "rank 0 does 120 ms of extra work after each step",
            "rank 0 does the extra work once in five steps",
            ZERO,
        ),
        experiment(
            "lengths",
            partial(train_on_lengths, alike=False),
            {"alike": True},
            "in some steps the batch of one rank has a long sequence, and that of the other rank has none",
            "in each step all ranks have sequences of similar length",
            ANY,
        ),
        experiment(
            "futile",
            partial(train, num_workers=2, accumulation=4, timeout_s=3600),
            {"slow": 1.0},
            "rank 1 is slow, and more workers, fewer synchronisations and a larger timeout do not help",
            "rank 1 is as fast as rank 0",
        ),
    ),
)

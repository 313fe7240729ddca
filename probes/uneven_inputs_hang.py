"""One rank has one batch more than the other, as after a split of the data by rank, file or token budget."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import Any, Iterator, List, Mapping

from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    Arm,
    Context,
    Expect,
    Experiment,
    Needs,
    Probe,
    Symptom,
    completed,
    raised,
    symptom,
)

BATCHES = (4, 3)  # rank by rank
TORCH = {"torch": ">=2.1"}


def train(ctx: Context, *, together: str = "", barrier_after: bool = False, timeout_s: float = 2) -> None:
    """Trains one epoch. `together` says how the ranks stop in the same step: agree, count, join, throw, or not."""
    import torch
    from torch import nn
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else timeout_s)
    model = DistributedDataParallel(nn.Linear(16, 16).to(ctx.device))
    loader: List[Any] = [torch.randn(2, 16, device=ctx.device) for _ in range(BATCHES[ctx.rank])]
    ctx.reached()
    batches: Any = loader
    if together == "agree":
        if ctx.rank:
            loader.insert(1, None)  # as a collator returns it for a broken sample
        batches = agreed_batches(loader, ctx.device)
    elif together == "count":
        batches = counted_batches(loader, ctx.device)
    steps, joins = 0, together in ("join", "throw")
    with Join([model], throw_on_early_termination=together == "throw") if joins else contextlib.nullcontext():
        for batch in batches:
            model(batch).sum().backward()
            assert model.module.weight.grad.isfinite().all().item()  # waits for the GPU, as logging a loss does
            steps += 1
    if barrier_after:
        torch.distributed.barrier()
    ctx.note(steps=steps)
    ctx.meet("trained", timeout_s=15)  # the rank that ran out of data is alive and busy elsewhere, as in training
    assert steps == (BATCHES[ctx.rank] if together == "join" else min(BATCHES)), steps


def agreed_batches(loader: Any, device: Any) -> Iterator[Any]:
    """Before every step all ranks agree on whether each of them has a batch."""
    import torch
    import torch.distributed as dist

    def in_step(batches, device):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        iterator = iter(batches)
        while True:
            batch = next((b for b in iterator if b is not None), None)
            ready = torch.tensor([float(batch is not None)], device=device)
            dist.all_reduce(ready, op=dist.ReduceOp.MIN)
            if not ready.item():
                return
            yield batch

    batches = in_step(loader, device)  # type: ignore[no-untyped-call]
    yield from batches


def counted_batches(loader: Any, device: Any) -> Iterator[Any]:
    """As many batches as the rank with the fewest has."""
    import torch
    import torch.distributed as dist

    n = torch.tensor([sum(1 for _ in loader)], device=device)
    dist.all_reduce(n, op=dist.ReduceOp.MIN)
    batches = itertools.islice(loader, n.item())
    yield from batches


def train_two_epochs(ctx: Context, *, momentum: float) -> None:
    """Trains two epochs under Join. A rank without batches makes no step, and gets the weights of the other rank."""
    import torch
    from torch import nn
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=5)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    ctx.reached()
    for _ in range(2):
        with Join([model]):
            for number in range(BATCHES[ctx.rank]):
                optimizer.zero_grad()
                model(torch.full((2, 4), 1.0 + number)).sum().backward()
                optimizer.step()
                if number == min(BATCHES) - 1:  # the last step that both ranks make
                    last_weight = model.module.weight.detach().clone()
    weights = [torch.zeros_like(last_weight) for _ in range(ctx.world_size)]
    dist.all_gather(weights, last_weight)
    difference = (weights[0] - weights[1]).abs().max().item()
    ctx.note(weights_apart=round(difference, 6))
    if difference > 1e-5:
        raise Symptom(f"in the second epoch the weights of the ranks are {difference:.3f} apart, no error")


def accumulate(ctx: Context, *, at_end_of_loader: bool) -> None:
    """accelerate accumulates over groups of two of three batches per rank. The third is the last one of rank 1."""
    dist = ctx.init_process_group(timeout_s=2)
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin  # type: ignore[import-not-found]

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(even_batches=False),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=at_end_of_loader),
    )
    loader = torch.utils.data.DataLoader(torch.ones(sum(BATCHES), 4), batch_size=1)
    model, loader = accelerator.prepare(torch.nn.Linear(4, 4), loader)
    assert len(loader) == BATCHES[ctx.rank]
    ctx.reached()
    for batch in itertools.islice(loader, min(BATCHES)):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
    ctx.meet("trained", timeout_s=15)
    dist.barrier()


def stream(ctx: Context, *, prepared: bool) -> None:
    """Loads a stream of seven samples, which the script splits by rank, or which accelerate splits."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    dist = ctx.init_process_group(timeout_s=2)
    from accelerate import Accelerator

    class Stream(IterableDataset):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, numbers: range) -> None:
            self.numbers = numbers

        def __iter__(self) -> Iterator[Any]:
            return (torch.tensor(float(number)) for number in self.numbers)

    if prepared:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Stream(range(7)), batch_size=1))
    else:
        loader = DataLoader(Stream(range(ctx.rank, 7, ctx.world_size)), batch_size=1)
    ctx.reached()
    sums = []
    for batch in loader:
        dist.all_reduce(batch)
        sums.append(batch.item())
    ctx.meet("trained", timeout_s=15)
    assert sums == [1, 5, 9, 6], sums  # the last step has sample 6 and, again, sample 0


def load(ctx: Context, *, even: bool) -> None:
    """Loads eleven samples, of which rank 0 gets six and rank 1 five: three full batches of two, and two."""
    import torch
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    dist = ctx.init_process_group(timeout_s=2)
    dataset = [torch.ones(4) for _ in range(11)]
    if even:
        loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, drop_last=True))
    else:
        loader = DataLoader(dataset[ctx.rank :: ctx.world_size], batch_size=2, drop_last=True)
    ctx.reached()
    for batch in loader:
        dist.all_reduce(batch.sum(0))
    ctx.meet("trained", timeout_s=15)
    ctx.note(batches=len(loader))


def validate(ctx: Context, *, even: bool) -> None:
    """Sums two scores after the epoch, each as long as a gradient. Wrong sums are noted and raise no error."""
    import torch

    dist = ctx.init_process_group(timeout_s=2)
    wrong: List[str] = []
    ctx.reached()
    try:
        for _ in range(min(BATCHES) if even else BATCHES[ctx.rank]):
            dist.all_reduce(torch.full((4,), 7.0))
        for number in (1, 2):
            score = torch.full((4,), float(number))
            dist.all_reduce(score)
            if score[0].item() != 2 * number:
                wrong.append(f"score {number} is {score[0].item():.0f}, not {2 * number}")
    except RuntimeError as error:
        raise RuntimeError(f"{error} Before that, without an error: {'; '.join(wrong)}") from error
    ctx.meet("validated", timeout_s=15)
    ctx.note(wrong=wrong)
    assert even == (not wrong), wrong


UNEVEN = "rank 0 has a fourth batch, and no other rank joins the all-reduce of its gradient"
EVEN = "the ranks agree before every step, and stop together after the third"
TIMEOUT = raised(GLOO_TIMEOUT)

gloo = Experiment(
    name="gloo",
    control=Arm(partial(train), expect=TIMEOUT, because=UNEVEN, fidelity="cpu"),
    treatment=Arm(partial(train, together="agree"), expect=completed(), because=EVEN, fidelity="cpu"),
    expected_s=(2.3, 0.3),
)


def variant(
    name: str,
    broken: Any,
    because: str,
    fixed: Mapping[str, Any],
    fix: str,
    expect: Expect = TIMEOUT,
    packages: Mapping[str, str] = TORCH,
) -> Experiment:
    """`broken` is the job of the control arm; `fixed` has the arguments that the treatment arm changes."""
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(broken, **fixed), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages=packages),
        expected_s=(2.3, 0.3),
    )


probe = Probe(
    experiments=(
        gloo.on_gpus(
            expect=raised(
                rf"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE|{NCCL2_TIMEOUT}"
            )
        ),
        gloo,
    ),
    variants=(
        variant(
            "even-split",
            partial(load, even=False),
            "each rank takes every second sample; despite drop_last=True, rank 0 has three batches and rank 1 two",
            {"even": True},
            "DistributedSampler(drop_last=True) gives both ranks five samples",
        ),
        variant(
            "counted",
            partial(train, barrier_after=True),
            "rank 0 all-reduces the gradient of a fourth batch while rank 1 is in the barrier after the epoch",
            {"together": "count"},
            "both ranks take as many batches as the rank with the fewest has",
        ),
        variant(
            "accumulate",
            partial(accumulate, at_end_of_loader=True),
            "rank 1 reduces gradients on the last batch of its loader; rank 0 has more batches and does not",
            {"at_end_of_loader": False},
            "with sync_with_dataloader=False both ranks reduce only after each group of two batches",
            packages={"torch": ">=2.2", "accelerate": ">=0.30"},
        ),
        variant(
            "stream",
            partial(stream, prepared=False),
            "the script gives each rank every second sample of the stream: four to rank 0, three to rank 1",
            {"prepared": True},
            "accelerate splits the whole stream, and fills the last step with a sample from its beginning",
            packages={"torch": ">=2.2", "accelerate": ">=0.30"},
        ),
        variant(
            "join",
            partial(train, timeout_s=3),
            f"{UNEVEN}; a longer timeout changes nothing",
            {"together": "join"},
            "under Join the rank without batches joins DDP's all-reduces, so all seven batches are used",
        ),
        variant(
            "join-momentum",
            partial(train_two_epochs, momentum=0.9),
            "the rank with fewer batches misses a momentum update, so its next epoch takes different steps",
            {"momentum": 0.0},
            "without momentum the optimizer has no state that could differ",
            symptom(r"the weights of the ranks are \d+\.\d+ apart"),
        ),
        variant(
            "join-throw",
            partial(train, together="throw"),
            "Join raises on all ranks as soon as one has no batch, and names that rank",
            {"together": "agree"},
            EVEN,
            raised(r"Detected at least one rank that exhausted inputs|Rank 1 exhausted all inputs"),
        ),
        variant(
            "validation",
            partial(validate, even=False),
            "rank 1 goes on to validation, and its sums are mixed with the gradient of rank 0",
            {"even": True},
            "both ranks make three steps, then validate together",
            raised(GLOO_TIMEOUT + r".*score 1 is (8|3), not 2"),
        ),
    ),
)

"""Does a rank get its samples in a new order in each epoch? It does if set_epoch reaches the sampler."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, Callable

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

SAMPLES, BATCH, EPOCHS = 16, 2, 3


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch.tolist()]


def judge(orders: list[list[int]]) -> None:
    """Raises `Symptom` if two epochs have the same order; `orders` are the samples of this rank in each epoch."""
    for epoch, order in enumerate(orders):
        if order in orders[:epoch]:
            numbers = (epoch, orders.index(order), len(order))
            raise Symptom("epoch %d repeats epoch %d: the same %d samples in the same order" % numbers)
    assert all(orders)


def run(ctx: Context, loader: Any, set_epoch: Any) -> None:
    orders = []
    ctx.reached()
    for epoch in range(EPOCHS):
        if set_epoch:
            set_epoch(epoch)
        orders.append(flat(loader))
    judge(orders)


def set_epoch_of(loader: object, epoch: int) -> None:
    parts, called = [loader], 0
    for part in parts:  # the list grows
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
            called += part is not loader  # accelerate's loader always has the method
        inner = [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
        parts += [each for each in inner if each is not None and all(each is not known for known in parts)]
    assert called, "nothing in this loader has set_epoch"


def make_sampler(dataset: Any) -> Any:
    """Returns the sampler of a job with one rank."""
    from torch.utils.data import DistributedSampler

    return DistributedSampler(dataset, num_replicas=1, rank=0)


def make_batch_sampler() -> Any:
    """Returns a custom batch sampler, as people write them for buckets or classes."""

    class CustomBatchSampler:
        batch_size, drop_last = BATCH, False

        def __init__(self) -> None:
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return SAMPLES // BATCH

        def __iter__(self) -> Iterator[list[int]]:
            order = list(range(SAMPLES))
            random.Random(self.epoch).shuffle(order)
            return iter([order[i : i + BATCH] for i in range(0, SAMPLES, BATCH)])

    return CustomBatchSampler()


def train(ctx: Context, *, with_epoch: bool) -> None:
    """Runs a custom training loop over three epochs."""
    from torch.utils.data import DataLoader, DistributedSampler

    ctx.init_process_group(timeout_s=15)
    dataset: Any = list(range(SAMPLES))
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    run(ctx, loader, sampler.set_epoch if with_epoch else None)


def order_of_calls(ctx: Context, *, early: bool) -> None:
    """With workers, the loader draws the order when its iterator is created."""
    from torch.utils.data import DataLoader

    dataset: Any = list(range(SAMPLES))
    sampler, orders = make_sampler(dataset), []
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    ctx.reached()
    for epoch in range(EPOCHS):
        if early:
            sampler.set_epoch(epoch)
        batches = iter(loader)
        if not early:
            sampler.set_epoch(epoch)
        orders.append(flat(batches))
    judge(orders)


def wrap_sampler(ctx: Context, *, way: str) -> None:
    """The loader gets a batch sampler, so its own `sampler` is a dummy."""
    from torch.utils.data import BatchSampler, DataLoader

    dataset: Any = list(range(SAMPLES))
    loader: Any = DataLoader(dataset, batch_sampler=BatchSampler(make_sampler(dataset), BATCH, False))

    def set_epoch(epoch: int) -> None:
        if way == "found":
            set_epoch_of(loader, epoch)
        elif way == "called" or hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)

    run(ctx, loader, set_epoch)


def by_steps(ctx: Context, *, counts: bool = True, loops: bool = True) -> None:
    """Runs a loop over steps, which has no epoch."""
    from torch.utils.data import DataLoader

    def endless(loader, sampler, epoch=0):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    dataset: Any = list(range(SAMPLES))
    sampler = make_sampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    batches: Iterator[Any] = itertools.cycle(loader)
    if loops:
        batches = (batch for _ in itertools.count() for batch in loader)
    if counts and loops:
        batches = endless(loader, sampler)  # type: ignore[no-untyped-call]
    ctx.reached()
    judge([flat(itertools.islice(batches, SAMPLES // BATCH)) for _ in range(EPOCHS)])


def persistent(ctx: Context, *, lives_on: bool) -> None:
    """Uses a dataset that depends on the epoch (a crop, a negative), in workers that may persist."""
    from torch.utils.data import DataLoader, Dataset

    class Crops(Dataset):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self) -> None:
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> int:
            return 1000 * self.epoch + index

    dataset = Crops()
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": lives_on, "multiprocessing_context": "fork"}
    run(ctx, DataLoader(dataset, batch_size=BATCH, **workers), dataset.set_epoch)


def prepare(ctx: Context, **options: Any) -> Any:
    """Returns accelerate's loader for this rank, or for a job with one rank."""
    if ctx.world_size > 1:
        ctx.init_process_group(timeout_s=15)
    else:
        without_launcher()
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.utils import DataLoaderConfiguration  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    dataset: Any = list(range(SAMPLES))
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    return accelerator.prepare(DataLoader(dataset, **options))


def stop_early(ctx: Context, *, with_epoch: bool) -> None:
    """accelerate counts an epoch only if it is complete, but this loop stops after three batches."""
    loader, orders = prepare(ctx, batch_size=BATCH, shuffle=True), []
    ctx.reached()
    for epoch in range(EPOCHS):
        if with_epoch:
            loader.set_epoch(epoch)
        batches = []
        for step, batch in enumerate(loader):
            if step == 3:
                break
            batches.append(batch)
        orders.append(flat(batches))
    judge(orders)


def two_ranks(ctx: Context, *, found: bool) -> None:
    """accelerate wraps the batch sampler if the job has more than one rank, and does not call its set_epoch."""
    loader = prepare(ctx, batch_sampler=make_batch_sampler())
    run(ctx, loader, partial(set_epoch_of, loader) if found else loader.set_epoch)


def own_sampler(ctx: Context, *, found: bool) -> None:
    """The loader has a sampler of its own; before 1.7 accelerate does not reach it if there is more than one rank."""
    loader = prepare(ctx, batch_size=BATCH, sampler=make_sampler(list(range(SAMPLES))))
    run(ctx, loader, partial(set_epoch_of, loader) if found else loader.set_epoch)


def hidden(ctx: Context, *, forwards: bool) -> None:
    """The custom batch sampler keeps its epoch in a part of its own, where set_epoch_of does not look."""

    class Outer:
        batch_size, drop_last = BATCH, False

        def __init__(self) -> None:
            self.inside = make_batch_sampler()
            if forwards:
                self.set_epoch = self.inside.set_epoch

        def __len__(self) -> int:
            return len(self.inside)

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.inside)

    loader = prepare(ctx, batch_sampler=Outer())
    run(ctx, loader, partial(set_epoch_of, loader))


def lightning(ctx: Context, *, hook: bool) -> None:
    """Runs Lightning's Trainer with a custom batch sampler that has set_epoch."""
    without_launcher()
    from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    ids: list[int] = []
    batch_sampler = make_batch_sampler()

    class Recorder(LightningModule):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            if hook:
                batch_sampler.set_epoch(self.current_epoch)

        def training_step(self, batch: Any, _: int) -> None:
            ids.extend(batch.tolist())

        def configure_optimizers(self) -> None:
            pass

    dataset: Any = list(range(SAMPLES))
    loader = DataLoader(dataset, batch_sampler=batch_sampler, num_workers=1, multiprocessing_context="fork")
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing", "use_distributed_sampler")
    ctx.reached()
    Trainer(max_epochs=EPOCHS, accelerator="cpu", **dict.fromkeys(names, False)).fit(Recorder(), loader)
    judge([ids[i : i + SAMPLES] for i in range(0, EPOCHS * SAMPLES, SAMPLES)])


REPEATS = symptom(r"epoch 1 repeats epoch 0: the same \d+ samples in the same order")
NO_ATTRIBUTE = raised(r"'SequentialSampler' object has no attribute 'set_epoch'")
NOT_CALLED = "the training loop never calls set_epoch"
CALLED = "the training loop calls set_epoch before each epoch"
Job = Callable[..., None]


def pair(name: str, job: Job, expect: Expect, because: str, fix: str, ranks: int = 1, **named: Any) -> Experiment:
    """`named`: the argument in which the arms differ, with its two values, and packages with their versions."""
    needs = {key: value for key, value in named.items() if isinstance(value, str)}
    [(key, (broken, fixed))] = [item for item in named.items() if item[0] not in needs]
    return Experiment(
        name=name,
        control=Arm(partial(job, **{key: broken}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{key: fixed}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **needs}),
        world_size=ranks,
        deadline_s=180.0 if needs else 30.0,
        expected_s=(4.0, 4.0) if needs else (0.5, 0.5),
    )


OFF_ON = (False, True)
ACCELERATE: dict[str, Any] = {"accelerate": ">=0.30"}
FOUND = "set_epoch is called on every part that the loader draws from"
probe = Probe(
    experiments=(pair("epoch", train, REPEATS, NOT_CALLED, CALLED, 2, with_epoch=OFF_ON),),
    variants=(
        pair(
            "late",
            order_of_calls,
            REPEATS,
            "the training loop calls set_epoch after iter(loader), which has drawn the order",
            "the training loop calls set_epoch before iter(loader)",
            early=OFF_ON,
        ),
        pair(
            "batch-sampler",
            wrap_sampler,
            REPEATS,
            "the code only looks for set_epoch on the loader's dummy sampler, which lacks it",
            FOUND,
            way=("asked", "found"),
        ),
        pair(
            "attribute",
            wrap_sampler,
            NO_ATTRIBUTE,
            "the code calls set_epoch on the loader's dummy sampler, which lacks it",
            FOUND,
            way=("called", "found"),
        ),
        pair(
            "steps",
            by_steps,
            REPEATS,
            "the loop over steps starts each pass without set_epoch",
            "a generator counts the passes and calls set_epoch",
            counts=OFF_ON,
        ),
        pair(
            "cycle",
            by_steps,
            REPEATS,
            "itertools.cycle repeats the batches that it has stored",
            "a generator iterates over the loader again in each pass",
            loops=OFF_ON,
        ),
        pair(
            "persistent",
            persistent,
            REPEATS,
            "persistent workers keep the copy of the dataset from the first epoch",
            "persistent_workers=False starts workers with a new copy in each epoch",
            lives_on=(True, False),
        ),
        pair(
            "accelerate-break",
            stop_early,
            REPEATS,
            "the loop stops early, so accelerate does not count the epoch from which its seedable sampler draws",
            CALLED,
            with_epoch=OFF_ON,
            **ACCELERATE,
        ),
        pair(
            "accelerate-batches",
            two_ranks,
            REPEATS,
            "set_epoch of accelerate's loader does not reach the custom batch sampler",
            FOUND,
            2,
            found=OFF_ON,
            **ACCELERATE,
        ),
        pair(
            "accelerate-sampler",
            own_sampler,
            REPEATS,
            "set_epoch of accelerate's loader does not reach the sampler inside the batch sampler that it wraps",
            FOUND,
            2,
            found=OFF_ON,
            accelerate=">=0.30,<1.7",
        ),
        pair(
            "hidden",
            hidden,
            raised("nothing in this loader has set_epoch"),
            "only accelerate's own loader has set_epoch; the batch sampler does not pass it on",
            "the batch sampler passes set_epoch on to the part that shuffles",
            forwards=OFF_ON,
            **ACCELERATE,
        ),
        pair(
            "lightning",
            lightning,
            REPEATS,
            "Lightning does not call set_epoch of the custom batch sampler",
            "a hook calls set_epoch in each epoch",
            hook=OFF_ON,
            lightning=">=2.0",
        ),
    ),
)

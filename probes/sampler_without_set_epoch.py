"""Which samples a rank gets in each epoch: another order each time, if the epoch reaches what draws the order."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, Callable

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

SAMPLES, BATCH, EPOCHS = 16, 2, 3


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch.tolist()]


def judge(orders: list[list[int]]) -> None:
    """`orders`: the samples of this rank in each epoch."""
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
    for part in parts:  # it grows
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
            called += 1
        inner = [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
        parts += [each for each in inner if each is not None and all(each is not known for known in parts)]
    assert called, "nothing in this loader has set_epoch"


def make_sampler(dataset: Any) -> Any:
    """That of the only rank."""
    from torch.utils.data import DistributedSampler

    return DistributedSampler(dataset, num_replicas=1, rank=0)


def own_batches() -> Any:
    """A batch sampler as people write them, for buckets or classes."""

    class OwnBatches:
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

    return OwnBatches()


def train(ctx: Context, *, with_epoch: bool) -> None:
    """A loop of one's own over three epochs."""
    from torch.utils.data import DataLoader, DistributedSampler

    ctx.init_process_group(timeout_s=15)
    dataset: Any = list(range(SAMPLES))
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    run(ctx, loader, sampler.set_epoch if with_epoch else None)


def order_of_calls(ctx: Context, *, early: bool) -> None:
    """With workers the order is drawn when the iterator is made."""
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


def wrapped(ctx: Context, *, way: str) -> None:
    """The loader was given a batch sampler: its `sampler` is a dummy."""
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
    """A loop over steps: nobody knows the epoch."""
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
    """A data set that chooses by the epoch (a crop, a negative), in workers that live on."""
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
    """accelerate's loader: of this rank, or of a job that has only one."""
    if ctx.world_size > 1:
        ctx.init_process_group(timeout_s=15)
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.utils import DataLoaderConfiguration  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    dataset: Any = list(range(SAMPLES))
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    return accelerator.prepare(DataLoader(dataset, **options))


def stop_early(ctx: Context, *, with_epoch: bool) -> None:
    """accelerate counts a pass when it is complete; this one ends after three batches."""
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
    """accelerate wraps a batch sampler where there are several ranks, and does not reach through."""
    loader = prepare(ctx, batch_sampler=own_batches())
    run(ctx, loader, partial(set_epoch_of, loader) if found else loader.set_epoch)


def lightning(ctx: Context, *, hook: bool) -> None:
    """Lightning's Trainer with a batch sampler that has a set_epoch of its own."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    ids: list[int] = []
    batch_sampler = own_batches()

    class Noting(LightningModule):  # type: ignore[misc]
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
    Trainer(max_epochs=EPOCHS, accelerator="cpu", **dict.fromkeys(names, False)).fit(Noting(), loader)
    judge([ids[i : i + SAMPLES] for i in range(0, EPOCHS * SAMPLES, SAMPLES)])


REPEATS = symptom(r"epoch 1 repeats epoch 0: the same \d+ samples in the same order")
NO_ATTRIBUTE = raised(r"'SequentialSampler' object has no attribute 'set_epoch'")
NOBODY, CALLED = "nobody calls set_epoch", "set_epoch before each epoch"
Job = Callable[..., None]


def pair(name: str, job: Job, expect: Expect, because: str, fix: str, ranks: int = 1, **named: Any) -> Experiment:
    """`named`: the keyword in which the arms differ with its two values, and packages with their versions."""
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


EPOCH, WAYS = (False, True), ("asked", "found")
ACCELERATE: dict[str, Any] = {"accelerate": ">=0.30"}
DUMMY, BOTH = "only the dummy sampler is asked for set_epoch", "set_epoch on all that the loader draws from"
WORKERS, ANEW = "the workers keep the copy of the first epoch", "persistent_workers=False"
LOADER = "set_epoch of the loader"
probe = Probe(
    experiments=(pair("epoch", train, REPEATS, NOBODY, CALLED, 2, with_epoch=EPOCH),),
    variants=(
        pair("late", order_of_calls, REPEATS, "set_epoch after iter(loader)", "before it", early=EPOCH),
        pair("batch-sampler", wrapped, REPEATS, DUMMY, BOTH, way=WAYS),
        pair("attribute", wrapped, NO_ATTRIBUTE, "the dummy has no set_epoch", BOTH, way=("called", "found")),
        pair("steps", by_steps, REPEATS, "passes without an epoch", "a generator counts them", counts=EPOCH),
        pair("cycle", by_steps, REPEATS, "cycle gives the stored batches", "the loader is run again", loops=EPOCH),
        pair("persistent", persistent, REPEATS, WORKERS, ANEW, lives_on=(True, False)),
        pair("accelerate-break", stop_early, REPEATS, "no pass ends", CALLED, with_epoch=EPOCH, **ACCELERATE),
        pair("accelerate-batches", two_ranks, REPEATS, LOADER, BOTH, 2, found=EPOCH, **ACCELERATE),
        pair("lightning", lightning, REPEATS, "it is not called", "a hook calls it", hook=EPOCH, lightning=">=2.0"),
    ),
)

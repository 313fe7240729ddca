"""A checkpoint holds no position in the data; a resume has to find it, in the same order and without reading."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, symptom

SAMPLES, BATCH, DONE, SEED = 16, 2, 2, 7  # stopped in epoch 1, behind DONE batches


class Counted:
    """Samples that take 2 ms each, as decoding or tokenizing does; the sample is its index."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        time.sleep(0.002)
        return index


def judge(ids: list[int], samples: int = SAMPLES) -> None:
    """Each sample of the epoch has to come once, in both parts of the run together."""
    counts = Counter(ids)
    twice, never = sum(count > 1 for count in counts.values()), samples - len(counts)
    if twice or never:
        raise Symptom(f"with the resume {twice} of {samples} samples came twice and {never} never")
    assert sorted(ids) == list(range(samples))


def flat(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch]


def resume(ctx: Context, *, with_epoch: bool) -> None:
    """Two ranks stop in epoch 1 and start again with a new sampler; the ids of all ranks are gathered."""
    from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

    dist = ctx.init_process_group(timeout_s=10)
    dataset = list(range(SAMPLES))
    sampler = DistributedSampler(dataset, seed=SEED)
    sampler.set_epoch(1)
    ids = flat(islice(iter(DataLoader(dataset, batch_size=BATCH, sampler=sampler)), DONE))
    ctx.reached()
    epoch, done, batch_size = 1, DONE, BATCH
    sampler = DistributedSampler(dataset, seed=SEED)
    if with_epoch:
        sampler.set_epoch(epoch)
    batches = list(BatchSampler(sampler, batch_size, drop_last=True))
    loader = DataLoader(dataset, batch_sampler=batches[done:])
    ids += flat(loader)
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, ids)
    dist.destroy_process_group()
    judge(parts[0] + parts[1])


def replay(ctx: Context, *, by_index: bool) -> None:
    """Samples that are read before the first new batch."""
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    done = 40
    dataset = Counted(100)
    ctx.reached()
    begin = time.monotonic()
    batches = list(BatchSampler(SequentialSampler(dataset), BATCH, drop_last=True))
    loader = DataLoader(dataset, batch_sampler=batches[done:] if by_index else batches)
    batch = next(islice(iter(loader), 0 if by_index else done, None))
    ctx.note(seconds=round(time.monotonic() - begin, 3))
    assert batch.tolist() == [80, 81]
    if dataset.reads > BATCH:
        raise Symptom(f"{dataset.reads} samples were read for the first batch behind the resume")


def shuffle(ctx: Context, *, own_generator: bool) -> None:
    """shuffle=True; the state of the global generator is restored as it was in the middle of the epoch."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    dataset, seed, epoch = list(range(SAMPLES)), SEED, 1

    def sample() -> Any:
        if not own_generator:
            return RandomSampler(dataset)
        generator = torch.Generator().manual_seed(seed + epoch)
        sampler = RandomSampler(dataset, generator=generator)
        assert sampler.generator is generator
        return sampler

    torch.manual_seed(0)
    ids = flat(islice(iter(DataLoader(dataset, batch_size=BATCH, sampler=sample())), DONE))
    state = torch.get_rng_state()
    ctx.reached()
    torch.set_rng_state(state)
    batches = list(BatchSampler(sample(), BATCH, drop_last=True))
    judge(ids + flat(DataLoader(dataset, batch_sampler=batches[DONE:])))


def each_epoch(ctx: Context, *, once: bool) -> None:
    """The skip of the resumed epoch, and the epoch behind it."""
    from torch.utils.data import BatchSampler, DataLoader

    dataset, done = list(range(SAMPLES)), DONE
    ctx.reached()
    for _ in range(2):
        batches = list(BatchSampler(dataset, BATCH, drop_last=True))
        ids = flat(DataLoader(dataset, batch_sampler=batches[done:]))
        if once:
            done = 0
    judge(ids)


def other_size(ctx: Context, *, in_samples: bool) -> None:
    """The position was counted in batches of 2 on one rank; the resumed run takes batches of 4."""
    from torch.utils.data import BatchSampler, DataLoader

    dataset, batch_size = list(range(SAMPLES)), 2 * BATCH
    ids = flat(islice(iter(DataLoader(dataset, batch_size=BATCH)), DONE))
    consumed = DONE * BATCH
    ctx.reached()
    done = consumed // batch_size if in_samples else DONE
    batches = list(BatchSampler(dataset, batch_size, drop_last=True))
    judge(ids + flat(DataLoader(dataset, batch_sampler=batches[done:])))


def stream(ctx: Context, *, seek: bool) -> None:
    """An IterableDataset: what is skipped is read, unless the data set itself begins at the position."""
    from torch.utils.data import DataLoader, IterableDataset

    source, consumed = Counted(100), 80

    class Rows(IterableDataset):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, start: int = 0) -> None:
            self.start = start

        def __iter__(self) -> Iterator[int]:
            return (source[index] for index in range(self.start, len(source)))

    ctx.reached()
    if seek:
        batch = next(iter(DataLoader(Rows(start=consumed), batch_size=BATCH)))
    else:
        batch = next(islice(iter(DataLoader(Rows(), batch_size=BATCH)), consumed // BATCH, None))
    assert batch.tolist() == [80, 81]
    if source.reads > BATCH:
        raise Symptom(f"{source.reads} samples were read for the first batch behind the resume")


def leave_launcher() -> None:
    """The libraries would look for the other ranks of a launcher's variables."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def train(ctx: Context, dataset: Any, seen: list[int], resumed: str = "", **options: Any) -> None:
    """A Trainer that notes the ids its model gets."""
    leave_launcher()
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Noting(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any, labels: Any = None) -> Any:
            seen.extend(x.flatten().long().tolist())
            return {"loss": (self.weight * x - labels).mean()}

    arguments = TrainingArguments(
        ctx.path("out"),
        per_device_train_batch_size=BATCH,
        save_steps=1,
        save_strategy="steps",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    Trainer(Noting(), arguments, train_dataset=dataset).train(resume_from_checkpoint=resumed or None)


def to_features(index: int) -> dict[str, Any]:
    import torch

    return {"x": torch.tensor([float(index)]), "labels": torch.tensor([0])}


def trainer(ctx: Context, *, ignore_data_skip: bool) -> None:
    """Two epochs of 8 steps; resumed in the second one."""
    dataset, first, rest = [to_features(index) for index in range(SAMPLES)], [], []  # type: ignore[var-annotated]
    train(ctx, dataset, first, num_train_epochs=2)
    ctx.reached()
    train(ctx, dataset, rest, ctx.path("out/checkpoint-10"), num_train_epochs=2, ignore_data_skip=ignore_data_skip)
    judge(first[SAMPLES : SAMPLES + DONE * BATCH] + rest)


def trainer_stream(ctx: Context, *, start: int = 10, skip: bool = False) -> None:
    """A stream, resumed behind 5 of 8 steps."""
    from torch.utils.data import IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc, type-arg, unused-ignore]
        reads = 0

        def __init__(self, start: int = 0) -> None:
            self.start = start

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for index in range(self.start, 2 * SAMPLES):
                Rows.reads += 1
                yield to_features(index)

    train(ctx, Rows(), [], max_steps=8)
    Rows.reads, rest = 0, []  # type: ignore[var-annotated]
    ctx.reached()
    ignore_data_skip = start > 0 and not skip
    train(ctx, Rows(start), rest, ctx.path("out/checkpoint-5"), max_steps=8, ignore_data_skip=ignore_data_skip)
    if rest[0] != 10:
        raise Symptom(f"with the resume {rest[0] - 10} of {2 * SAMPLES} samples were left out")
    assert rest == list(range(10, 16))
    if Rows.reads > len(rest) + BATCH:  # the loader is one batch ahead
        raise Symptom(f"{Rows.reads} samples were read for the {len(rest)} behind the resume")


def prepared(ctx: Context, *, seedable: bool = True, with_epoch: bool = True) -> None:
    """accelerate: stopped in epoch 1, then state, skip_first_batches and the rest of the epoch."""
    leave_launcher()
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.utils import DataLoaderConfiguration  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    def begin() -> Any:
        torch.manual_seed(SEED)
        configuration = DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        return accelerator, accelerator.prepare(DataLoader(list(range(SAMPLES)), batch_size=BATCH, shuffle=True))

    accelerator, loader = begin()
    flat(loader)
    iterator = iter(loader)
    ids = flat(islice(iterator, DONE))
    accelerator.save_state(ctx.path("state"))
    ctx.reached()
    accelerator, loader = begin()
    accelerator.load_state(ctx.path("state"))
    epoch, done = 1, DONE
    active = accelerator.skip_first_batches(loader, done)
    if with_epoch:
        active.set_epoch(epoch)
    judge(ids + flat(active))


def lightning(ctx: Context, *, resumable: bool) -> None:
    """Two epochs of 8 steps, stopped in the second and resumed."""
    leave_launcher()
    import torch
    from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found]
    from lightning.pytorch.callbacks import ModelCheckpoint  # type: ignore[import-not-found]
    from torch.utils.data import BatchSampler, DataLoader

    ids: list[int] = []

    class Noting(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, _: int) -> Any:
            ids.extend(batch.tolist())
            return (self.weight * batch.float()).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    class ResumableLoader:
        def __init__(self, dataset: Any, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0) -> None:
            self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
            self.rank, self.world_size = rank, world_size
            self.epoch = self.done = 0

        def __len__(self) -> int:
            return len(self.dataset) // self.world_size // self.batch_size

        def __iter__(self) -> Iterator[Any]:
            if self.done >= len(self):
                self.epoch, self.done = self.epoch + 1, 0
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(self.dataset), generator=generator).tolist()
            own = order[self.rank :: self.world_size][: len(self) * self.batch_size]
            own = own[self.done * self.batch_size :]
            for batch in DataLoader(self.dataset, batch_sampler=BatchSampler(own, self.batch_size, False)):
                self.done += 1
                yield batch

        def state_dict(self) -> dict[str, int]:
            return {"epoch": self.epoch, "done": self.done}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.epoch, self.done = state["epoch"], state["done"]

    def fit(steps: int, path: Any = None) -> None:
        save = ModelCheckpoint(dirpath=ctx.path("out"), every_n_train_steps=DONE, filename="{step}", save_top_k=-1)
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [save]}
        dataset = list(range(SAMPLES))
        loader: Any = ResumableLoader(dataset, BATCH) if resumable else DataLoader(dataset, batch_size=BATCH)
        trainer = Trainer(max_steps=steps, max_epochs=2, accelerator="cpu", **options)
        trainer.fit(Noting(), loader, ckpt_path=path)

    steps = SAMPLES // BATCH + DONE
    fit(steps)
    ctx.reached()
    fit(-1, ctx.path(f"out/step={steps}.ckpt"))
    judge(ids[SAMPLES:])


def stateful(ctx: Context, *, with_epoch: bool) -> None:
    """torchdata's loader restores how far it was, and not the epoch of the sampler."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found]

    dataset = list(range(SAMPLES))

    def build(epoch: int) -> Any:
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=SEED)
        sampler.set_epoch(epoch)
        return StatefulDataLoader(dataset, batch_size=BATCH, sampler=sampler)

    loader = build(1)
    iterator = iter(loader)
    ids = flat(islice(iterator, DONE))
    state = loader.state_dict()
    ctx.reached()
    loader = build(1 if with_epoch else 0)
    loader.load_state_dict(state)
    judge(ids + flat(loader))


TWICE = symptom(r"with the resume \d+ of \d+ samples came twice and \d+ never")
NEVER = symptom(r"with the resume 0 of 16 samples came twice and 4 never")
READ = symptom(r"\d+ samples were read for the (first batch|6) behind the resume")


def pair(
    name: str,
    job: Callable[..., None],
    change: tuple[str, Any, Any],
    expect: Expect,
    because: str,
    fix: str,
    *,
    world_size: int = 1,
    **packages: str,
) -> Experiment:
    """`change` is a keyword, its value in the control arm and its value in the treatment."""
    key, wrong, right = change
    return Experiment(
        name=name,
        control=Arm(partial(job, **{key: wrong}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{key: right}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **packages}),
        world_size=world_size,
        deadline_s=60.0 if packages else 20.0,
        expected_s=(4.0, 4.0) if packages else (0.4, 0.4),
    )


OFF_ON = (False, True)
probe = Probe(
    experiments=(
        pair(
            "order",
            resume,
            ("with_epoch", *OFF_ON),
            TWICE,
            "the new sampler has the order of epoch 0, and the first batches of that order are skipped",
            "the new sampler gets the epoch ahead of the skip",
            world_size=2,
        ),
    ),
    variants=(
        pair(
            "replay",
            replay,
            ("by_index", *OFF_ON),
            READ,
            "40 batches are drawn from the loader and dropped",
            "the indices of 40 batches are dropped, ahead of the loader",
        ),
        pair(
            "stream",
            stream,
            ("seek", *OFF_ON),
            READ,
            "a stream has no indices; what is skipped is read",
            "the stream begins at the position",
        ),
        pair(
            "shuffle",
            shuffle,
            ("own_generator", *OFF_ON),
            TWICE,
            "the global generator is restored as it was in mid-epoch and draws another order",
            "the order is drawn by a generator that is seeded with seed plus epoch",
        ),
        pair(
            "each-epoch",
            each_epoch,
            ("once", *OFF_ON),
            NEVER,
            "the skip is applied in the next epoch too",
            "the skip is 0 behind the resumed epoch",
        ),
        pair(
            "batch-size",
            other_size,
            ("in_samples", *OFF_ON),
            NEVER,
            "2 batches of 2 were seen, and 2 of 4 are skipped",
            "4 samples were seen, and 4 are skipped",
        ),
        pair(
            "trainer",
            trainer,
            ("ignore_data_skip", True, False),
            TWICE,
            "with ignore_data_skip the epoch begins again, and the last steps see its first half twice",
            "the Trainer skips by index",
            transformers=">=5.0",
            accelerate="",
        ),
        pair(
            "trainer-stream",
            trainer_stream,
            ("start", 0, 10),
            READ,
            "the Trainer reads the stream up to the step",
            "the stream begins at the position, and ignore_data_skip leaves that to it",
            transformers=">=4.41",
            accelerate="",
        ),
        pair(
            "trainer-stream-twice",
            trainer_stream,
            ("skip", True, False),
            symptom(r"with the resume 10 of 32 samples were left out"),
            "the stream begins at the position, and the Trainer skips as many again",
            "ignore_data_skip",
            transformers=">=4.41",
            accelerate="",
        ),
        pair(
            "accelerate",
            prepared,
            ("seedable", *OFF_ON),
            TWICE,
            "load_state and skip_first_batches with the plain RandomSampler, saved in mid-epoch",
            "use_seedable_sampler: the order follows from seed and epoch",
            accelerate=">=0.30",
        ),
        pair(
            "accelerate-epoch",
            prepared,
            ("with_epoch", *OFF_ON),
            TWICE,
            "a seedable sampler in a new process, which is at epoch 0",
            "set_epoch on what skip_first_batches returns",
            accelerate=">=0.30",
        ),
        pair(
            "lightning",
            lightning,
            ("resumable", *OFF_ON),
            TWICE,
            "a plain DataLoader begins anew in mid-epoch",
            "a loader with state_dict and load_state_dict",
            lightning=">=2.3",
        ),
        pair(
            "stateful",
            stateful,
            ("with_epoch", *OFF_ON),
            TWICE,
            "StatefulDataLoader in a new process whose sampler is at epoch 0",
            "the sampler gets the epoch",
            torchdata=">=0.9",
        ),
    ),
)

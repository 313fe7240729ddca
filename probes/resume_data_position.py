"""A checkpoint holds no position in the data: the resume must find it in the same order, without reading samples."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, symptom

SAMPLES, BATCH, DONE, SEED = 16, 2, 2, 7  # the run stops in epoch 1, after DONE batches


class Counted:
    """Counts reads. Each takes 2 ms, like decoding or tokenizing, and returns the index of the sample."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        time.sleep(0.002)
        return index


def judge(ids: list[int], samples: int = SAMPLES) -> None:
    """Raises `Symptom` unless both parts of the run together read each sample of the epoch exactly once."""
    counts = Counter(ids)
    twice, never = sum(count > 1 for count in counts.values()), samples - len(counts)
    if twice or never:
        raise Symptom(f"with the resume {twice} of {samples} samples came twice and {never} never")
    assert sorted(ids) == list(range(samples))


def flat(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch]


def resume(ctx: Context, *, with_epoch: bool) -> None:
    """Two ranks stop in epoch 1 and start again with a new sampler. Judges the ids of both ranks together."""
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
    judge(parts[0] + parts[1])


def replay(ctx: Context, *, by_index: bool) -> None:
    """Counts the samples that the resume reads until it has the first new batch."""
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
    """shuffle=True. The resume restores the state that the global generator had in the middle of the epoch."""
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


def position(ctx: Context, *, once: bool = True, in_samples: bool = True) -> None:
    """The run has read 2 batches of 2. The resumed run reads batches of 4, in the rest of this epoch and the next."""
    from torch.utils.data import BatchSampler, DataLoader

    dataset, batch_size, consumed = list(range(SAMPLES)), 2 * BATCH, DONE * BATCH
    ids = dataset[:consumed]
    done = consumed // batch_size if in_samples else DONE
    ctx.reached()
    for _ in range(2):
        batches = list(BatchSampler(dataset, batch_size, drop_last=True))
        judge(ids + flat(DataLoader(dataset, batch_sampler=batches[done:])))
        ids = []
        if once:
            done = 0


def rebuilt(ctx: Context, *, with_seed: bool) -> None:
    """Each start shuffles the rows before it makes the loader."""
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    def loader_from(done: int) -> Any:
        rows = list(range(64))
        random.Random(SEED if with_seed else None).shuffle(rows)
        batches = list(BatchSampler(SequentialSampler(rows), BATCH, drop_last=True))
        return DataLoader(rows, batch_sampler=batches[done:])  # type: ignore[arg-type, unused-ignore]

    ids = flat(islice(iter(loader_from(0)), DONE))
    ctx.reached()
    judge(ids + flat(loader_from(DONE)), 64)


def stream_of(source: Any, start: int, rewind: bool = True) -> Any:
    """A stream whose first pass begins at `start`, and with `rewind` every later pass at 0."""
    from torch.utils.data import IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, source: Any, start: int) -> None:
            self.source, self.start = source, start

        def __iter__(self) -> Iterator[Any]:
            rows = (self.source[index] for index in range(self.start, len(self.source)))
            if rewind:
                self.start = 0
            return rows

    return Rows(source, start)


def stream(ctx: Context, *, seek: bool) -> None:
    """The loader of an IterableDataset reads the skipped samples, unless the dataset begins at the position."""
    from torch.utils.data import DataLoader

    source, consumed = Counted(100), 80
    ctx.reached()
    loader = DataLoader(stream_of(source, consumed if seek else 0), batch_size=BATCH)
    batch = next(islice(iter(loader), 0 if seek else consumed // BATCH, None))
    assert batch.tolist() == [80, 81]
    if source.reads > BATCH:
        raise Symptom(f"{source.reads} samples were read for the first batch behind the resume")


def train(ctx: Context, dataset: Any, seen: list[int], resumed: str = "", **options: Any) -> None:
    """The Trainer; the model appends the ids of its samples to `seen`."""
    without_launcher()
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Model(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any, labels: Any = None) -> Any:
            seen.extend(x.flatten().long().tolist())
            return {"loss": (self.weight * x - labels).mean()}

    options |= {"save_strategy": "steps", "save_steps": 1, "logging_strategy": "no", "report_to": []}
    options |= {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": BATCH}
    arguments = TrainingArguments(ctx.path("out"), **options)
    Trainer(Model(), arguments, train_dataset=dataset).train(resume_from_checkpoint=resumed or None)


class Features(Counted):
    """The samples in the form that the Trainer needs."""

    def __getitem__(self, index: int) -> Any:
        import torch

        return {"x": torch.tensor([float(super().__getitem__(index))]), "labels": torch.tensor([0])}


def trainer(ctx: Context, *, skip: bool = True, seedable: bool = True) -> None:
    """The Trainer runs two epochs of 8 steps, and resumes in the second one."""
    dataset, first, rest = Features(SAMPLES), [], []  # type: ignore[var-annotated]
    options: dict[str, Any] = {"num_train_epochs": 2, "accelerator_config": {"use_seedable_sampler": seedable}}
    train(ctx, dataset, first, **options)
    ctx.reached()
    train(ctx, dataset, rest, ctx.path("out/checkpoint-10"), ignore_data_skip=not skip, **options)
    judge(first[SAMPLES : SAMPLES + DONE * BATCH] + rest)


def trainer_stream(ctx: Context, *, seek: bool = True, leave: bool = True, rewind: bool = True) -> None:
    """Resumes a stream of 24 samples after 5 of 16 steps of 2: the rest of this pass and 8 samples of the next."""
    source, start, steps, rest = Features(24), 10, 16, []  # type: ignore[var-annotated]
    train(ctx, stream_of(source, 0), [], max_steps=steps)
    source.reads = 0
    ctx.reached()
    dataset, ignore_data_skip = stream_of(source, start if seek else 0, rewind), seek and leave
    train(ctx, dataset, rest, ctx.path("out/checkpoint-5"), max_steps=steps, ignore_data_skip=ignore_data_skip)
    expected = [*range(start, len(source)), *range(8)]
    skipped = next((got - due for got, due in zip(rest, expected, strict=False) if got != due), 0)
    if skipped:
        raise Symptom(f"with the resume {skipped} of {len(source)} samples were left out")
    assert rest == expected
    if source.reads > len(rest) + 2 * BATCH:  # the loader is one batch ahead
        raise Symptom(f"{source.reads} samples were read for the {len(rest)} behind the resume")


def prepared(ctx: Context, *, seedable: bool = True, with_epoch: bool = True) -> None:
    """accelerate stops in epoch 1, loads its state, skips batches and reads the rest of the epoch."""
    without_launcher()
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
    if with_epoch:
        loader.set_epoch(epoch)
    active = accelerator.skip_first_batches(loader, done)
    if with_epoch:
        active.set_epoch(epoch)
    judge(ids + flat(active))


def lightning(ctx: Context, *, at_end: bool) -> None:
    """A run of three epochs stops in the second one; the resume begins in mid-epoch or at the end of the first."""
    without_launcher()
    import torch
    from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found]
    from lightning.pytorch.callbacks import ModelCheckpoint  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    folder, length = ctx.path("out"), SAMPLES // BATCH

    class Model(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.ids: list[int] = []

        def training_step(self, batch: Any, _: int) -> Any:
            self.ids.extend(batch.tolist())
            return (self.weight * batch.float()).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def fit(steps: int, path: Any = None) -> list[int]:
        save = ModelCheckpoint(dirpath=folder, save_top_k=-1, every_n_train_steps=DONE)
        if at_end:
            save = ModelCheckpoint(dirpath=folder, save_top_k=-1, save_on_train_epoch_end=True)
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [save]}
        trainer = Trainer(max_steps=steps, max_epochs=3, accelerator="cpu", **options)
        model = Model()
        trainer.fit(model, DataLoader(range(SAMPLES), batch_size=BATCH, shuffle=True), ckpt_path=path)
        return model.ids

    first = fit(length + DONE)
    ctx.reached()
    path = f"{folder}/epoch={0 if at_end else 1}-step={length if at_end else length + DONE}.ckpt"
    rest = fit(-1, path)
    judge((first[:SAMPLES] if at_end else first)[SAMPLES:] + rest[:-SAMPLES])
    judge(rest[-SAMPLES:])


def stateful(ctx: Context, *, with_epoch: bool = True, new_state: bool = True, done: int = DONE) -> None:
    """torchdata's loader restores its position in the epoch, but not the epoch of the sampler."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found]

    dataset = list(range(SAMPLES))
    at_end = done * BATCH == SAMPLES

    def build(epoch: int) -> Any:
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=SEED)
        sampler.set_epoch(epoch)
        return StatefulDataLoader(dataset, batch_size=BATCH, sampler=sampler)

    loader = build(1)
    iterator = iter(loader)
    ids = flat(islice(iterator, done))
    state = loader.state_dict()
    ctx.reached()
    loader = build((2 if at_end else 1) if with_epoch else 0)
    if not (at_end and new_state):
        loader.load_state_dict(state)
    judge(([] if at_end else ids) + flat(loader))


def stateful_at_end(ctx: Context, *, new_state: bool) -> None:
    """The run saves the state of torchdata's loader after the last batch of an epoch."""
    stateful(ctx, new_state=new_state, done=SAMPLES // BATCH)


TWICE = symptom(r"with the resume \d+ of \d+ samples came twice and \d+ never")
NEVER = symptom(r"with the resume 0 of 16 samples came twice and 4 never")
EMPTY = symptom(r"with the resume 0 of 16 samples came twice and 16 never")
SKIPPED = symptom(r"with the resume 10 of 24 samples were left out")
READ = symptom(r"\d+ samples were read for the (first batch|22) behind the resume")
OLD: dict[str, Any] = {"transformers": ">=4.41", "accelerate": ""}
NEW: dict[str, Any] = {"transformers": ">=5.0", "accelerate": ""}
Job = Callable[..., None]


def pair(
    name: str, job: Job, key: str, expect: Expect, because: str, fix: str, *, ranks: int = 1, **packages: str
) -> Experiment:
    """`key` is False in the control arm and True in the treatment."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{key: False}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{key: True}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **packages}),
        world_size=ranks,
        deadline_s=60.0 if packages else 20.0,
        expected_s=(4.0, 4.0) if packages else (0.4, 0.4),
    )


ORDER = pair(
    "order",
    resume,
    "with_epoch",
    TWICE,
    "the new sampler is at epoch 0, so the resume skips batches in the order of epoch 0",
    "the code calls set_epoch on the new sampler before it skips",
    ranks=2,
)
VARIANTS = (
    pair(
        "replay",
        replay,
        "by_index",
        READ,
        "the resume draws 40 batches from the loader and drops them, which reads every sample",
        "the resume drops the indices of 40 batches and reads no sample of them",
    ),
    pair(
        "stream",
        stream,
        "seek",
        READ,
        "a stream has no indices, so the resume reads every sample that it skips",
        "the stream itself begins at the position",
    ),
    pair(
        "shuffle",
        shuffle,
        "own_generator",
        TWICE,
        "the sampler draws a new order from the global generator, whose state is that of mid-epoch",
        "the sampler has its own generator, seeded with the seed plus the epoch",
    ),
    pair(
        "each-epoch",
        position,
        "once",
        NEVER,
        "the loader skips the same batches in the next epoch too",
        "the loader skips batches only in the resumed epoch",
    ),
    pair(
        "batch-size",
        position,
        "in_samples",
        NEVER,
        "the run has read 2 batches of 2, and the resume skips 2 batches of 4",
        "the position is a number of samples, so the resume skips 4 samples",
    ),
    pair(
        "rebuilt",
        rebuilt,
        "with_seed",
        TWICE,
        "the code shuffles the rows without a seed at each start",
        "the code shuffles the rows with a seed",
    ),
    pair(
        "trainer",
        trainer,
        "skip",
        TWICE,
        "with ignore_data_skip=True the Trainer begins the epoch again",
        "with ignore_data_skip=False the Trainer skips by index",
        **NEW,
    ),
    pair(
        "trainer-sampler",
        trainer,
        "seedable",
        TWICE,
        "use_seedable_sampler is off, so the order depends on the global generator",
        "use_seedable_sampler is on, so the order depends on the seed and the epoch",
        **NEW,
    ),
    pair(
        "trainer-stream",
        trainer_stream,
        "seek",
        READ,
        "the Trainer reads the stream up to the step of the checkpoint",
        "the stream begins at the position, and ignore_data_skip is True",
        **OLD,
    ),
    pair(
        "trainer-stream-twice",
        trainer_stream,
        "leave",
        SKIPPED,
        "the stream begins at the position, and the Trainer skips as many samples again",
        "the stream begins at the position, and with ignore_data_skip=True the Trainer skips nothing",
        **OLD,
    ),
    pair(
        "trainer-stream-pass",
        trainer_stream,
        "rewind",
        SKIPPED,
        "every pass over the stream begins at the position",
        "only the first pass over the stream begins at the position",
        **OLD,
    ),
    pair(
        "accelerate",
        prepared,
        "seedable",
        TWICE,
        "accelerate shuffles with a RandomSampler, which draws from the global generator",
        "accelerate shuffles with use_seedable_sampler=True",
        accelerate=">=0.30",
    ),
    pair(
        "accelerate-epoch",
        prepared,
        "with_epoch",
        TWICE,
        "the loader is at epoch 0 when the resume skips batches",
        "the code calls set_epoch on both loaders",
        accelerate=">=0.30",
    ),
    pair(
        "lightning",
        lightning,
        "at_end",
        TWICE,
        "Lightning resumes from the middle of an epoch and begins the epoch again",
        "Lightning resumes from the end of an epoch",
        lightning=">=2.3",
    ),
    pair(
        "stateful",
        stateful,
        "with_epoch",
        TWICE,
        "StatefulDataLoader restores its position, but the sampler is at epoch 0",
        "the code calls set_epoch on the sampler before it loads the state",
        torchdata=">=0.9",
    ),
    pair(
        "stateful-end",
        stateful_at_end,
        "new_state",
        EMPTY,
        "the code loads the state of a finished epoch, so the next epoch is empty",
        "the code does not load the state of a finished epoch",
        torchdata=">=0.9",
    ),
)
probe = Probe(experiments=(ORDER,), variants=VARIANTS)

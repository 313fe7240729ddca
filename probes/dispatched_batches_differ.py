"""Rank 0 reads a stream for all ranks and joins their batches: they have different widths, or text in them."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

BATCH, SAMPLES, WIDEST, SEED = 4, 16, 32, 42


def tokens(number: int) -> List[int]:
    """A sample: the later in the stream, the longer. Its number is its first token."""
    return [number] + [0] * (3 + number)


def pad(samples: List[List[int]], width: int) -> Any:
    import torch

    return torch.tensor([sample + [0] * (width - len(sample)) for sample in samples])


def collator(what: str) -> Callable[[List[List[int]]], Dict[str, Any]]:
    """How a batch is made: its width, and what else it holds."""
    import torch

    def collate(samples: List[List[int]]) -> Dict[str, Any]:
        longest = max(len(sample) for sample in samples)
        if what == "multiple of 8":
            return {"input_ids": pad(samples, (longest + 7) // 8 * 8)}
        if what == "scalar":
            return {"input_ids": pad(samples, WIDEST), "count": torch.tensor(len(samples))}
        if what == "text":
            return {"input_ids": pad(samples, WIDEST), "name": ["sample %d" % sample[0] for sample in samples]}
        return {"input_ids": pad(samples, WIDEST if what == "max_length" else longest)}

    return collate


def numbers(ctx: Context, samples: int, *, shuffled: str = "", split: bool = False) -> Any:
    """A stream that every rank can read from the beginning to the end, in torch's class for it."""
    import random

    from torch.utils.data import IterableDataset

    order = list(range(samples))
    if shuffled:
        random.Random(SEED if shuffled == "one seed" else SEED + ctx.rank).shuffle(order)
    if split:
        order = order[ctx.rank :: ctx.world_size]

    class Stream(IterableDataset):  # type: ignore[misc,type-arg,unused-ignore]
        def __iter__(self) -> Iterator[List[int]]:
            return map(tokens, order)

    return Stream()


def judge(ctx: Context, sizes: List[int], seen: List[int], samples: int) -> None:
    """Each rank gets the batch size that was asked for, and together they get each sample."""
    import torch.distributed as dist

    every: List[Any] = [None] * ctx.world_size
    dist.all_gather_object(every, (sizes, seen))
    ctx.note(batch_sizes=[part[0] for part in every], samples=[part[1] for part in every])
    if max(max(part[0]) for part in every) < BATCH:
        raise Symptom("batch size %d on each rank, asked for %d" % (max(sizes), BATCH))
    missing = set(range(samples)).difference(*(part[1] for part in every))
    if missing:
        raise Symptom("%d of %d samples came to no rank" % (len(missing), samples))
    assert len({len(part[0]) for part in every}) == 1 and set(every[0][0]) == {BATCH}, every


def plain(ctx: Context, *, dispatches: bool) -> None:
    """What accelerate does, in torch: rank 0 joins a batch for each rank, broadcasts it, and each takes a slice."""
    import torch
    from torch.utils.data import DataLoader

    dist = ctx.init_process_group(timeout_s=30)
    loader = DataLoader(numbers(ctx, SAMPLES), batch_size=BATCH, collate_fn=collator("longest"))
    ctx.reached()
    sizes, seen = [], []
    batches = iter(loader)
    for _ in range(SAMPLES // BATCH // ctx.world_size):
        if dispatches:
            shape: List[Any] = [None]
            if ctx.rank == 0:
                joined = torch.cat([next(batches)["input_ids"] for _ in range(ctx.world_size)])
                shape = [joined.shape]
            dist.broadcast_object_list(shape)
            if ctx.rank > 0:
                joined = torch.empty(shape[0], dtype=torch.int64)
            dist.broadcast(joined, src=0)
            mine = joined[ctx.rank * BATCH : (ctx.rank + 1) * BATCH]
        else:
            mine = [next(batches)["input_ids"] for _ in range(ctx.world_size)][ctx.rank]
        sizes.append(len(mine))
        seen += mine[:, 0].tolist()
    judge(ctx, sizes, seen, SAMPLES)


def prepared(ctx: Context, *, config: str, what: str = "longest", samples: int = SAMPLES, **order: Any) -> None:
    """An epoch of a loader that accelerate has prepared."""
    from accelerate import Accelerator, DataLoaderConfiguration  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    ctx.init_process_group(timeout_s=30)
    stream, collate = numbers(ctx, samples, **order), collator(what)
    if config == "dispatch_batches=False":
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    elif config == "split_batches=True":
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    else:
        accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(stream, batch_size=BATCH, collate_fn=collate))
    ctx.reached()
    sizes, seen = [], []
    for batch in loader:
        sizes.append(len(batch["input_ids"]))
        seen += batch["input_ids"][:, 0].tolist()
        assert "name" not in batch or batch["name"] == ["sample %d" % number for number in seen[-BATCH:]]
    judge(ctx, sizes, seen, samples)


def trainer(ctx: Context, *, accelerator_config: Dict[str, bool]) -> None:
    """The Trainer of transformers, and what its model gets."""
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    ctx.init_process_group(timeout_s=30)
    sizes: List[int] = []
    seen: List[int] = []

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, input_ids: Any) -> Any:
            sizes.append(len(input_ids))
            seen.extend(input_ids[:, 0].tolist())
            return {"loss": (self.weight * input_ids).square().mean()}

    output_dir, options = ctx.path("out"), {"use_cpu": True, "report_to": "none", "save_strategy": "no"}
    options.update(max_steps=SAMPLES // BATCH // ctx.world_size, per_device_train_batch_size=BATCH)
    if accelerator_config == {"dispatch_batches": False}:
        args = TrainingArguments(output_dir, accelerator_config={"dispatch_batches": False}, **options)
    else:
        args = TrainingArguments(output_dir, accelerator_config=accelerator_config, **options)
    job = Trainer(Model(), args, train_dataset=numbers(ctx, SAMPLES), data_collator=collator("longest"))
    ctx.reached()
    assert job.train().global_step == SAMPLES // BATCH // ctx.world_size
    judge(ctx, sizes, seen, SAMPLES)


def evaluation(ctx: Context, *, streamed: bool) -> None:
    """The Trainer's metrics with dispatch_batches=False: of a stream, or of the same samples with random access."""
    import torch
    from transformers import Trainer, TrainingArguments

    ctx.init_process_group(timeout_s=30)

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, input_ids: Any, labels: Any) -> Any:  # noqa: ARG002  the Trainer looks for the name
            return {"loss": input_ids.float().mean(), "logits": input_ids[:, :1].float()}

    def collate(samples: List[List[int]]) -> Dict[str, Any]:
        return {"input_ids": pad(samples, WIDEST), "labels": torch.zeros(len(samples))}

    count = SAMPLES + 1
    options = {"use_cpu": True, "report_to": "none", "per_device_eval_batch_size": BATCH}
    args = TrainingArguments(ctx.path("out"), accelerator_config={"dispatch_batches": False}, **options)
    dataset = numbers(ctx, count) if streamed else list(map(tokens, range(count)))
    job = Trainer(
        Model(),
        args,
        eval_dataset=dataset,
        data_collator=collate,
        compute_metrics=lambda result: {"samples": len(result.predictions)},
    )
    ctx.reached()
    samples = job.evaluate()["eval_samples"]
    if samples != count:
        raise Symptom("the metrics are of %d samples, the evaluation set has %d" % (samples, count))


DIFFERENT = raised(r"You can't use batches of different size with `dispatch_batches=True`")
BARE = raised(r"Sizes of tensors must match except in dimension 0")
TEXT = raised(r"Can only concatenate tensors but got <class 'str'>")
HALF = symptom(r"batch size 2 on each rank, asked for 4")
MISSING = symptom(r"\d+ of 16 samples came to no rank")
JOINS, OWN = "rank 0 joins batches of different widths", "dispatch_batches=False: each rank makes its own batches"
DEFAULT, OFF, SPLIT = "default", "dispatch_batches=False", "split_batches=True"
CONFIG = (DEFAULT, OFF)


def pair(
    name: str,
    job: Callable[..., None],
    expect: Expect,
    because: str = JOINS,
    fix: str = OWN,
    fidelity: str = "cpu",
    packages: Tuple[Tuple[str, str], ...] = (("accelerate", ">=0.28"),),
    **arms: Tuple[Any, Any],
) -> Experiment:
    """`arms`: the keyword in which they differ, with its two values."""
    [(key, (broken, fixed))] = arms.items()
    env = {"ACCELERATE_USE_CPU": "true"}
    stands_for = "the DataLoaderDispatcher of accelerate" if fidelity == "stand-in" else ""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{key: broken}), expect, because, fidelity, stands_for, env),
        treatment=Arm(partial(job, **{key: fixed}), completed(), fix, fidelity, stands_for, env),
        needs=Needs(packages={"torch": ">=2.1", **dict(packages)}),
        deadline_s=90.0 if packages else 20.0,
        expected_s=(4.0, 4.0) if packages else (1.0, 1.0),
    )


TRAINER = (("transformers", ">=4.46"), ("accelerate", ">=1.0"))
ORDER = partial(prepared, config=OFF, what="max_length")

probe = Probe(
    experiments=(pair("torch", plain, BARE, fidelity="stand-in", packages=(), dispatches=(True, False)),),
    variants=(
        pair("accelerate", prepared, DIFFERENT, config=CONFIG),
        pair("trainer", trainer, DIFFERENT, packages=TRAINER, accelerator_config=({}, {"dispatch_batches": False})),
        pair(
            "max-length", partial(prepared, config=DEFAULT), DIFFERENT, fix="one width", what=("longest", "max_length")
        ),
        pair("multiple", partial(prepared, what="multiple of 8"), DIFFERENT, config=CONFIG),
        pair("scalar", partial(prepared, what="scalar"), DIFFERENT, "a tensor without dimension 0", config=CONFIG),
        pair("text", partial(prepared, what="text"), TEXT, "rank 0 joins lists of text", config=CONFIG),
        pair("split-size", prepared, HALF, "each rank gets its share of one batch", config=(SPLIT, OFF)),
        pair(
            "split-last",
            partial(prepared, samples=SAMPLES + 1),
            BARE,
            "the last batch has one sample: it is filled up with the first batch, which is narrower",
            config=(SPLIT, OFF),
        ),
        pair(
            "evaluation",
            evaluation,
            symptom(r"the metrics are of \d+ samples, the evaluation set has 17"),
            "the last group of the stream is filled up from its first one, and the metrics count these samples again",
            "an evaluation set that is not streamed",
            packages=TRAINER,
            streamed=(True, False),
        ),
        pair("order", ORDER, MISSING, "each rank has its own order", "one seed", shuffled=("each its own", "one seed")),
        pair("split-twice", ORDER, MISSING, "the stream is already split by rank", "not split", split=(True, False)),
    ),
)

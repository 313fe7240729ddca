"""Ranks, the workers of their loaders, or epochs draw copies of the same random sequences."""

import os
import random
from functools import partial
from itertools import combinations
from typing import Any, Callable, Dict, List, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, symptom

SEED, WORKERS, EPOCHS = 42, 2, 2
Drawn = Dict[Tuple[int, int], List[Any]]  # by (epoch, worker), one value of each generator
ONLY_READER, ONE, EACH_RANK, PROCESS = (0, 0), "one for all", "one for each rank", "torch, random, numpy"


def judge(ctx: Context, drawn: Drawn, kinds: str) -> None:
    """Raises `Symptom` with the generators from which two readers drew the same, and where these readers are."""
    every: List[Any] = [drawn]
    if ctx.world_size > 1:
        import torch.distributed as dist

        every = [None] * ctx.world_size
        dist.all_gather_object(every, drawn)
    found: Dict[str, List[str]] = {}
    for number, kind in enumerate(kinds.split(", ")):
        readers = {(rank, *at): str(values[number]) for rank, of in enumerate(every) for at, values in of.items()}
        copies = len(readers) - len(set(readers.values()))
        alike = [(a, b) for a, b in combinations(readers, 2) if readers[a] == readers[b]]
        apart = [[i for i in range(3) if a[i] != b[i]] for a, b in alike]
        where = " and ".join(name for i, name in enumerate(("ranks", "epochs", "workers")) if [i] in apart)
        text = "%d of %d random sequences are copies, across %s" % (copies, len(readers), where)
        if copies:
            found.setdefault(text, []).append(kind)
    if found:
        raise Symptom("; ".join("%s: %s" % (", ".join(names), text) for text, names in found.items()))


def seed_all(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)


def train(ctx: Context, *, seed: str) -> None:
    """Runs a DDP model with dropout and draws noise, as diffusion does. All ranks build the model with one seed."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist = ctx.init_process_group(timeout_s=15)
    rank, device = ctx.rank, ctx.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seed_all(SEED)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).to(device))
    if seed == EACH_RANK:
        random.seed(SEED + rank)
        torch.manual_seed(SEED + rank)
    ctx.reached()
    mask = (model(torch.ones(1, 4, device=device)) == 0).tolist()
    noise = torch.randn(4, device=device).tolist()
    judge(ctx, {ONLY_READER: [mask, noise, random.random()]}, "dropout, noise, random")
    weight = model.module[0].weight.detach()
    weights = [torch.zeros_like(weight) for _ in range(ctx.world_size)]
    dist.all_gather(weights, weight)
    assert all(torch.equal(weight, each) for each in weights), "the models of the ranks differ"


def make_dataset(own_generator: bool) -> Any:
    """A dataset whose samples come from the generators of the process, or from a generator of its own."""
    import numpy
    import torch
    from torch.utils.data import Dataset

    class Augmented(Dataset):  # type: ignore[misc]
        def __init__(self) -> None:
            self.generator = random.Random()

        def __len__(self) -> int:
            return WORKERS

        def __getitem__(self, index: int) -> List[str]:
            if own_generator:
                return [str(self.generator.random())]
            return [str(torch.rand(1).item()), str(random.random()), str(numpy.random.random())]

    return Augmented()


def read(loader: Any) -> Drawn:
    """Reads all epochs. Sample i of an epoch comes from worker i."""
    return {(epoch, at): sample for epoch in range(EPOCHS) for at, sample in enumerate(loader)}


def seed_by_number(worker_id: int) -> None:
    random.seed(SEED + worker_id)


def seed_by_torch(_: int) -> None:
    import torch

    random.seed(torch.initial_seed() % 2**32)


def load(
    ctx: Context, *, ranks: str = EACH_RANK, loader: str = "", init: str = "", own_generator: bool = False
) -> None:
    """Reads samples with two forked workers per rank."""
    import torch
    from torch.utils.data import DataLoader, get_worker_info

    def seed_worker(worker_id: int) -> None:
        dataset = get_worker_info().dataset
        assert isinstance(dataset.generator, random.Random)
        dataset.generator = random.Random(torch.initial_seed())

    if ctx.world_size > 1:
        ctx.init_process_group(timeout_s=15)
    rank = ctx.rank if loader == EACH_RANK else 0
    generator = torch.Generator()
    generator.manual_seed(SEED + rank)
    seed_all(SEED + (ctx.rank if ranks == EACH_RANK else 0))
    data = DataLoader(
        make_dataset(own_generator),
        batch_size=None,
        num_workers=WORKERS,
        multiprocessing_context="fork",
        generator=generator if loader else None,
        worker_init_fn={"": None, "worker": seed_by_number, "recipe": seed_by_torch, "dataset": seed_worker}[init],
    )
    ctx.reached()
    drawn = read(data)
    if init == "worker" or (init == "recipe" and not own_generator):  # these functions seed only `random`
        drawn = {at: [values[1]] for at, values in drawn.items()}
    judge(ctx, drawn, "dataset" if own_generator else "random" if init else PROCESS)


def split_model(ctx: Context, *, seed: str) -> None:
    """Each of two ranks has half of one layer. The sum of their results goes through dropout on both ranks."""
    import torch

    dist = ctx.init_process_group(timeout_s=15)
    data_parallel_rank = ctx.rank if seed == EACH_RANK else ctx.rank // 2
    torch.manual_seed(SEED + data_parallel_rank)
    ctx.reached()
    result = torch.full((64,), 1.0 + ctx.rank)
    dist.all_reduce(result)
    dropped = torch.nn.functional.dropout(result, 0.5)
    both = [torch.zeros_like(dropped) for _ in range(2)]
    dist.all_gather(both, dropped)
    wrong = int((both[0] != both[1]).sum())
    if wrong:
        raise Symptom("%d of 64 activations differ between the ranks of one model copy" % wrong)


def accelerated(ctx: Context, *, specific: bool = True, generator: str = "") -> None:
    """Seeds two ranks with accelerate's `set_seed`, or passes a loader with a generator to its `prepare`."""
    ctx.init_process_group(timeout_s=30)
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.utils import set_seed  # type: ignore[import-not-found]
    from torch.utils.data import ConcatDataset, DataLoader

    accelerator = Accelerator(cpu=True)
    dataset = make_dataset(own_generator=False)
    options: Any = {"num_workers": WORKERS, "multiprocessing_context": "fork", "collate_fn": lambda batch: batch[0]}
    if generator == "given":
        options["generator"] = torch.Generator()
        options["generator"].manual_seed(SEED + ctx.rank)
    loader = accelerator.prepare(DataLoader(ConcatDataset([dataset] * 2), shuffle=True, **options))
    set_seed(SEED, device_specific=specific)
    ctx.reached()
    judge(ctx, read(loader) if generator else {ONLY_READER: dataset[0]}, PROCESS)


def fit(ctx: Context, *, callback: bool) -> None:
    """Runs the Trainer on two ranks and draws one number in each step. The ranks read different samples."""
    rank, size = str(ctx.rank), str(ctx.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    ctx.init_process_group(timeout_s=60)
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed  # type: ignore[import-not-found]

    class SeedRanks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            assert args.data_seed is not None  # else a second train() draws samples by rank
            set_seed(args.seed + args.process_index)

    drawn: List[float] = []
    samples: List[Any] = []

    class Recorded(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            drawn.append(torch.rand(1).item())
            samples.extend(inputs["features"].flatten().tolist())
            return model(inputs["features"]).sum()

    options: Any = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    options.update(seed=SEED, data_seed=SEED)
    options.update(max_steps=4, per_device_train_batch_size=2, remove_unused_columns=False, output_dir=ctx.path("out"))
    data = [{"features": torch.full((1,), float(i))} for i in range(16)]
    callbacks = [SeedRanks()] if callback else []
    trainer = Recorded(torch.nn.Linear(1, 1), TrainingArguments(**options), train_dataset=data, callbacks=callbacks)
    ctx.reached()
    trainer.train()
    judge(ctx, {ONLY_READER: [drawn, sorted(samples)]}, "torch, samples")


def copies(kinds: str, count: str, where: str) -> Expect:
    return symptom(r"(?<!, )%s: %s random sequences are copies, across %s(?! and)" % (kinds, count, where))


ALIKE, EACH, SEEDS = "all ranks have the same seed", "each rank has a seed of its own", (ONE, EACH_RANK)
LOADERS = "the generators of all loaders have the same seed"
HALF, SAME = copies(PROCESS, "4 of 8", "ranks"), copies(PROCESS, "1 of 2", "ranks")
AGAIN, OWN = copies("random", "6 of 8", "ranks and epochs"), copies("dataset", "3 of 4", "epochs and workers")
DIFFER = symptom(r"[1-9]\d* of 64 activations differ between the ranks of one model copy")
BY_WORKER = (
    "worker_init_fn seeds with the job's seed plus worker_id",
    "worker_init_fn uses the seed that torch gave the worker",
)
COPIED = "each worker has a copy of the dataset's generator", "worker_init_fn replaces the generator in each worker"
SPLIT = "the two ranks of one model copy have different seeds", "the two ranks of one model copy have the same seed"
SYNCED = "prepare copies the state of rank 0's generator to the loaders of all ranks", "the loader has no generator"
SEEDED = "the Trainer seeds all ranks alike", "a callback adds the rank to the seed"
NUMPY, ACCELERATE, TRAINER = {"numpy": ""}, {"accelerate": ">=0.14"}, {"transformers": ">=4.46", "accelerate": ">=1.1"}


def pair(name: str, job: Callable[..., None], expect: Expect, because: str, fix: str, **named: Any) -> Experiment:
    """`named`: the keyword in which the arms differ and its two values, the number `of` ranks, and `packages`."""
    world_size, packages = named.pop("of", 2), named.pop("packages", {})
    [(key, (broken, fixed))] = named.items()
    return Experiment(
        name=name,
        control=Arm(partial(job, **{key: broken}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{key: fixed}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **packages}),
        world_size=world_size,
        deadline_s=90.0 if "accelerate" in packages else 25.0,
        expected_s=(9.0, 9.0) if "accelerate" in packages else (2.0, 2.0),
    )


gloo = pair("gloo", train, copies("dropout, noise, random", "1 of 2", "ranks"), ALIKE, EACH, seed=SEEDS)
INITS, GENERATORS = ("recipe", "dataset"), ("given", "none")
SET_SEED = {"packages": ACCELERATE, "specific": (False, True)}

probe = Probe(
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        pair("workers", load, HALF, ALIKE, EACH, ranks=SEEDS, packages=NUMPY),
        pair("loader", load, HALF, LOADERS, EACH, loader=SEEDS, packages=NUMPY),
        pair("init", load, AGAIN, *BY_WORKER, init=("worker", "recipe"), packages=NUMPY),
        pair("own-generator", partial(load, own_generator=True), OWN, *COPIED, init=INITS, of=1, packages=NUMPY),
        pair("split-model", split_model, DIFFER, *SPLIT, seed=(EACH_RANK, ONE)),
        pair("set-seed", accelerated, SAME, ALIKE, EACH, **SET_SEED),
        pair("prepared", accelerated, HALF, *SYNCED, generator=GENERATORS, packages=ACCELERATE),
        pair("trainer", fit, copies("torch", "1 of 2", "ranks"), *SEEDED, callback=(False, True), packages=TRAINER),
    ),
)

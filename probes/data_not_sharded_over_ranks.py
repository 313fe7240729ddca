"""Do two ranks share 32 samples so that each gets 16, and no sample goes to both?"""

import random
from functools import partial
from itertools import islice
from typing import Any, Callable, Iterator, List, Optional

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, symptom

SAMPLES = 32


def compare(ctx: Context, dist: Any, seen: List[int]) -> None:
    """Raises `Symptom` if both ranks have seen the same samples, or samples are missing."""
    by_rank: List[Any] = [None] * ctx.world_size
    dist.all_gather_object(by_rank, sorted(seen))
    ctx.note(samples=len(seen))
    twice = len(set(by_rank[0]) & set(by_rank[1]))
    never = SAMPLES - len(set(by_rank[0]) | set(by_rank[1]))
    if twice or never:
        raise Symptom("of %d samples %d came to both ranks, %d to none" % (SAMPLES, twice, never))


def load(ctx: Context, *, way: str) -> None:
    """Reads one epoch from a loader with batches of 4; `way` says how it is built."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    dist = ctx.init_process_group(timeout_s=10)
    dataset = list(range(SAMPLES))
    torch.manual_seed(0)
    ctx.reached()
    if way == "sampler":
        sampler = DistributedSampler(dataset, shuffle=True, seed=0)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        for epoch in range(1):
            sampler.set_epoch(epoch)
            seen = [sample for batch in loader for sample in batch.tolist()]
    elif way.startswith("shuffle"):
        torch.manual_seed(ctx.rank if way == "shuffle, own seed" else 0)
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        seen = [sample for batch in loader for sample in batch.tolist()]
    else:  # two nodes of one GPU each: the local rank is 0 on both
        rank = {"local rank": 0, "own seed": ctx.rank}[way]
        seed = ctx.rank if way == "own seed" else 0
        seen = list(DistributedSampler(dataset, num_replicas=2, rank=rank, seed=seed))
    compare(ctx, dist, seen)


def make_stream(ctx: Context, sliced: bool, shuffle: Optional[Callable[[List[int]], None]] = None) -> Any:
    """Returns an iterable dataset of all samples, or (`sliced`) of those of this rank and this worker."""
    from torch.utils.data import IterableDataset, get_worker_info

    rank, world_size = ctx.rank, ctx.world_size

    class Stream(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            if not sliced:
                return iter(range(SAMPLES))
            worker = get_worker_info()
            count, number = (worker.num_workers, worker.id) if worker else (1, 0)
            if shuffle is None:
                return islice(range(SAMPLES), rank * count + number, None, world_size * count)
            samples = list(range(SAMPLES))
            shuffle(samples)
            return islice(samples, rank * count + number, None, world_size * count)

    return Stream()


def shuffle_alike(samples: List[int]) -> None:
    random.Random(0).shuffle(samples)


def stream(ctx: Context, *, sliced: bool, shuffle: Optional[Callable[[List[int]], None]] = None) -> None:
    """Reads a stream with two workers on each rank."""
    import torch
    from torch.utils.data import DataLoader

    dist = ctx.init_process_group(timeout_s=10)
    torch.manual_seed(0)
    ctx.reached()
    samples = make_stream(ctx, sliced, shuffle)
    loader = DataLoader(samples, batch_size=4, num_workers=2, multiprocessing_context="fork")
    compare(ctx, dist, [sample for batch in loader for sample in batch.tolist()])


def split(ctx: Context, *, shared_generator: bool) -> None:
    """Splits a dataset in training and validation parts, on ranks that each have a seed for their augmentation."""
    import torch
    from torch.utils.data import random_split

    dist = ctx.init_process_group(timeout_s=10)
    dataset: Any = list(range(SAMPLES))
    torch.manual_seed(1234 + ctx.rank)
    ctx.reached()
    if shared_generator:
        generator = torch.Generator().manual_seed(42)
        training, validation = random_split(dataset, [24, 8], generator=generator)
    else:
        training, validation = random_split(dataset, [24, 8])
    trained: List[Any] = [None] * ctx.world_size
    dist.all_gather_object(trained, list(training.indices))
    leaked = set(validation.indices) & {index for indices in trained for index in indices}
    if leaked:
        raise Symptom("%d of 8 validation samples are training samples of another rank" % len(leaked))


def prepare(ctx: Context, *, way: str) -> None:
    """Passes a loader to accelerate's `prepare`, which shards it even if it is sharded already."""
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader, DistributedSampler

    dist = ctx.init_process_group(timeout_s=10)
    options = {}
    if way.endswith("seed"):
        from accelerate.utils import DataLoaderConfiguration  # type: ignore[import-not-found]

        options = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}
    accelerator = Accelerator(cpu=True, **options)
    dataset: Any = list(range(SAMPLES))
    torch.manual_seed(ctx.rank if way == "own seed" else 0)
    ctx.reached()
    if way == "twice":
        loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
    elif "stream" in way:
        loader = DataLoader(make_stream(ctx, sliced=way == "sliced stream"), batch_size=4)
    else:
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
    if way != "never":
        loader = accelerator.prepare(loader)
    compare(ctx, dist, [sample for batch in loader for sample in batch.tolist()])


ALL_TWICE = symptom(r"of 32 samples 32 came to both ranks, 0 to none")
OVERLAP = symptom(r"of 32 samples [1-9]\d* came to both ranks, [1-9]\d* to none")


def pair(
    name: str,
    broken: Callable[..., None],
    fixed: Callable[..., None],
    expect: Expect,
    because: str,
    fix: str,
    accelerate: Optional[str] = None,
) -> Experiment:
    packages = {"torch": ">=2.1", **({} if accelerate is None else {"accelerate": accelerate})}
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages=packages),
        world_size=2,
        deadline_s=30.0 if accelerate is None else 120.0,
        expected_s=(0.5, 0.5) if accelerate is None else (6.0, 6.0),
    )


SHARDED = "a DistributedSampler gives each rank half of the samples"

probe = Probe(
    experiments=(
        pair(
            "sampler",
            partial(load, way="shuffle"),
            partial(load, way="sampler"),
            ALL_TWICE,
            "the loader has shuffle=True and no distributed sampler, so each rank reads everything",
            SHARDED,
        ),
    ),
    variants=(
        pair(
            "local-rank",
            partial(load, way="local rank"),
            partial(load, way="sampler"),
            symptom(r"of 32 samples 16 came to both ranks, 16 to none"),
            "the script passes the local rank to the sampler, and it is 0 on both nodes",
            "the sampler uses the rank of the process group",
        ),
        pair(
            "seed",
            partial(load, way="own seed"),
            partial(load, way="sampler"),
            OVERLAP,
            "each rank passes a different seed to the sampler, so their orders differ",
            "all ranks pass the same seed to the sampler",
        ),
        pair(
            "own-seed",
            partial(load, way="shuffle, own seed"),
            partial(load, way="sampler"),
            ALL_TWICE,
            "the loader has shuffle=True and each rank another seed; the order differs, but each rank reads everything",
            SHARDED,
        ),
        pair(
            "stream",
            partial(stream, sliced=False),
            partial(stream, sliced=True),
            ALL_TWICE,
            "each worker of each rank reads the whole stream",
            "each of the four workers reads every fourth sample, with a different offset",
        ),
        pair(
            "stream-shuffle",
            partial(stream, sliced=True, shuffle=random.shuffle),
            partial(stream, sliced=True, shuffle=shuffle_alike),
            OVERLAP,
            "each worker shuffles with its own generator before it takes every fourth sample",
            "all workers of all ranks shuffle with the same seed",
        ),
        pair(
            "split",
            partial(split, shared_generator=False),
            partial(split, shared_generator=True),
            symptom(r"[1-9] of 8 validation samples are training samples of another rank"),
            "random_split uses the global generator, whose seed differs on each rank",
            "random_split gets a generator with the same seed on every rank",
        ),
        pair(
            "prepare",
            partial(prepare, way="never"),
            partial(prepare, way="once"),
            ALL_TWICE,
            "the script does not pass the loader to accelerate's prepare, so nothing shards it",
            "accelerate's prepare shards the loader",
            "",
        ),
        pair(
            "prepare-twice",
            partial(prepare, way="twice"),
            partial(prepare, way="once"),
            symptom(r"of 32 samples 0 came to both ranks, 16 to none"),
            "the loader has a DistributedSampler, and accelerate's prepare shards it again",
            "accelerate's prepare gets a loader without a sampler",
            "",
        ),
        pair(
            "prepare-stream",
            partial(prepare, way="sliced stream"),
            partial(prepare, way="whole stream"),
            symptom(r"of 32 samples 0 came to both ranks, 16 to none"),
            "the stream is split by rank, and accelerate's prepare splits it again",
            "accelerate's prepare gets the whole stream",
            "",
        ),
        pair(
            "prepare-seed",
            partial(prepare, way="own seed"),
            partial(prepare, way="same seed"),
            OVERLAP,
            "each rank has a different seed when accelerate prepares a seedable sampler",
            "all ranks have the same seed when accelerate prepares the loader",
            ">=0.30",
        ),
    ),
)

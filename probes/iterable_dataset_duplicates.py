"""Several workers of several ranks read a stream. If they do not divide it, they read the same samples."""

import logging
import os
import random
import tarfile
import warnings
from collections import Counter
from functools import partial
from io import BytesIO
from itertools import islice
from typing import Any, Callable, Iterator, List, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

SAMPLES, SEED = 16, 42


def judge(every: List[List[int]], samples: int = SAMPLES) -> None:
    """Raises `Symptom` if a sample was read twice. `every` lists the samples of one epoch for each rank."""
    times = Counter(sample for part in every for sample in part)
    if max(times.values()) > 1:
        numbers = (sum(times.values()), len(times), max(times.values()))
        raise Symptom("%d samples read, %d different, up to %d times each" % numbers)
    assert len(times) == samples, sorted(times)


def gather(ctx: Context, seen: List[int]) -> List[Any]:
    if ctx.world_size == 1:
        return [seen]
    import torch.distributed as dist

    every: List[Any] = [None] * ctx.world_size
    dist.all_gather_object(every, seen)
    return every


def load(dataset: Any, workers: int = 2, batch_size: Any = None) -> Any:
    """Creates a loader. Its workers are forked, so they need not import this file."""
    from torch.utils.data import DataLoader

    context = "fork" if workers else None
    return DataLoader(dataset, batch_size=batch_size, num_workers=workers, multiprocessing_context=context)


def read(files: List[range]) -> Iterator[int]:
    for file in files:
        yield from file


def make_stream(by: Tuple[str, ...], rank: int, world_size: int, files: int = 8) -> Any:
    """A stream of files, which the readers divide `by` rank, by worker, by both, or not at all."""
    from torch.utils import data

    get_worker_info: Any = data.get_worker_info if "worker" in by else lambda: None

    class Stream(data.IterableDataset):  # type: ignore[misc]
        def __init__(self, files: List[range], rank: int, world_size: int) -> None:
            self.files, self.rank, self.world_size = files, rank, world_size

        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Iterator[int]:
            worker = get_worker_info()
            count, number = (worker.num_workers, worker.id) if worker else (1, 0)
            reader, readers = self.rank * count + number, self.world_size * count
            if len(self.files) < readers:
                return islice(read(self.files), reader, None, readers)
            return read(self.files[reader::readers])

    size = SAMPLES // files
    rank, world_size = (rank, world_size) if "rank" in by else (0, 1)
    return Stream([range(size * i, size * (i + 1)) for i in range(files)], rank, world_size)


def stream(ctx: Context, *, by: Tuple[str, ...], files: int = 8, warn: bool = False) -> None:
    """Reads one epoch with two workers per rank. With `warn`, torch's warning about the length becomes an error."""
    if ctx.world_size > 1:
        ctx.init_process_group(timeout_s=15)
    loader = load(make_stream(by, ctx.rank, ctx.world_size, files))
    ctx.reached()
    if warn:
        assert len(loader) == SAMPLES
        warnings.filterwarnings("error", "Length of IterableDataset")
    judge(gather(ctx, list(loader)))


def draw(ctx: Context, *, seed: str) -> None:
    """Reads an endless stream of random samples. All ranks set the same seed, as scripts do."""
    import torch
    from torch.utils.data import IterableDataset

    rank = ctx.rank

    class Drawn(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            if seed == "global":
                while True:
                    yield random.getrandbits(60)
            if seed == "one for all":
                generator = random.Random(SEED)
            else:
                drawn = torch.randint(2**62, (1,)).item()  # differs between the workers of a rank, and between passes
                generator = random.Random("%d %d" % (rank, drawn))
            while True:
                yield generator.getrandbits(60)

    ctx.init_process_group(timeout_s=15)
    random.seed(SEED)
    torch.manual_seed(SEED)
    ctx.reached()
    judge(gather(ctx, list(islice(load(Drawn()), 8))), 8 * ctx.world_size)


def prepared(ctx: Context, *, by: Tuple[str, ...]) -> None:
    """accelerate divides a stream among the ranks, but not among the workers of a rank."""
    from accelerate import Accelerator  # type: ignore[import-not-found]

    ctx.init_process_group(timeout_s=15)
    accelerator = Accelerator(cpu=True)
    loader = load(make_stream(by, ctx.rank, ctx.world_size), batch_size=2)
    ctx.reached()
    judge(gather(ctx, [sample for batch in accelerator.prepare(loader) for sample in batch.tolist()]))


def write_shards(ctx: Context, count: int) -> List[str]:
    """Writes tar files with one sample each."""
    paths = [ctx.path("shard-%02d.tar" % number) for number in range(count)]
    for number, path in enumerate(paths):
        content, member = str(number).encode(), tarfile.TarInfo("%04d.txt" % number)
        member.size = len(content)
        with tarfile.open(path, "w") as shard:
            shard.addfile(member, BytesIO(content))
    return paths


def webdataset(ctx: Context, *, way: str, workers: int = 2, shards: int = SAMPLES) -> None:
    """Reads the stream as one rank after the other: webdataset takes rank and world size from the environment."""
    import webdataset as wds  # type: ignore[import-not-found]

    warnings.simplefilter("ignore")
    urls, every = write_shards(ctx, shards), []
    ctx.reached()
    for rank in range(2 if way != "one rank" else 1):
        if way != "one rank":
            os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        if way == "split_by_node":
            dataset = wds.WebDataset(urls, nodesplitter=wds.split_by_node, shardshuffle=False)
        elif way == "None":
            dataset = wds.WebDataset(urls, nodesplitter=None, shardshuffle=False)
        elif "pipeline" in way:
            splits = [wds.split_by_node, wds.split_by_worker]
            if way == "bare pipeline":
                splits = []
            if way == "shuffled pipeline":
                splits = [wds.shuffle(100), *splits]
            if way == "detshuffled pipeline":
                splits = [wds.detshuffle(100), *splits]
            dataset = wds.DataPipeline(wds.SimpleShardList(urls), *splits, wds.tarfile_to_samples())
        else:
            dataset = wds.WebDataset(urls, shardshuffle=False)
        every.append([int(sample["txt"]) for sample in load(dataset, workers)])
    judge(every, shards)


class AsSymptom(logging.Handler):
    """Turns a warning that datasets logs into a `Symptom`."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            raise Symptom(record.getMessage())


def datasets(ctx: Context, *, way: str, files: int = SAMPLES, workers: int = 0) -> None:
    """Reads the stream as two ranks, one after the other, or with the workers of one rank."""
    from datasets import IterableDataset  # type: ignore[import-not-found]
    from datasets.distributed import split_dataset_by_node  # type: ignore[import-not-found]

    def samples(shards: List[int]) -> Iterator[Any]:
        for shard in shards:
            yield from ({"id": shard * SAMPLES // files + i} for i in range(SAMPLES // files))

    whole, every = IterableDataset.from_generator(samples, gen_kwargs={"shards": list(range(files))}), []
    logging.getLogger("datasets").addHandler(AsSymptom())
    ctx.reached()
    for rank in range(1 if workers else 2):
        part, world_size = whole, 2
        if way == "split":
            part = split_dataset_by_node(whole, rank=rank, world_size=world_size)
        if way == "shuffle":
            part = split_dataset_by_node(whole.shuffle(), rank=rank, world_size=world_size)
        if way == "shuffle, seed":
            shuffled = whole.shuffle(seed=SEED)
            part = split_dataset_by_node(shuffled, rank=rank, world_size=world_size)
        if way == "split, skip":  # skips one sample on each rank
            part = split_dataset_by_node(whole, rank=rank, world_size=world_size).skip(1)
        if way == "skip, split":
            part = split_dataset_by_node(whole.skip(2), rank=rank, world_size=world_size)
        every.append([int(sample["id"]) for sample in load(part, workers)])
    judge(every, SAMPLES - 2 * ("skip" in way))


def read_times(read: str, different: str, times: str) -> Expect:
    return symptom(r"(?<!\S)%s samples read, %s different, up to %s times each" % (read, different, times))


TWICE, SOME = read_times("32", "16", "2"), read_times("16", r"\d+", "[2-9]")
FOUR, ONE_SEED, REST = read_times("64", "16", "4"), read_times("16", "4", "4"), read_times("30", "15", "2")
NEITHER: Tuple[str, ...] = ()
BOTH, WHOLE = ("rank", "worker"), "each worker reads all files, so samples repeat"
EACH = "each worker of each rank reads files of its own"
NODE = "webdataset splits the shards by rank, then by worker"
SAME_SEED = "every reader draws with the same seed"
OWN_SEED = "each reader draws with a seed of its own"
GLOBAL_SEED = "each worker draws with random, whose seed torch sets alike on all ranks"
SKIPS = (
    "skip after the split undoes the split, so both ranks read the same samples",
    "skip is called before the split",
)
SHUFFLES = "each reader shuffles in its own order before the split", "all readers shuffle in the same order"
SEEDS = "shuffle has no seed, so each rank shuffles in its own order", "shuffle has the same seed on all ranks"
SHUFFLED = "shuffled pipeline", "detshuffled pipeline"
WDS, HF = {"webdataset": ">=0.2.40"}, {"datasets": ">=2.12"}


def pair(name: str, job: Callable[..., None], expect: Expect, because: str, fix: str, **named: Any) -> Experiment:
    """`named`: the keyword in which the arms differ and its two values, `ranks`, and packages with their versions."""
    needs = {key: value for key, value in named.items() if isinstance(value, str)}
    ranks = named.pop("ranks", 1)
    [(key, (broken, fixed))] = [item for item in named.items() if item[0] not in needs]
    return Experiment(
        name=name,
        control=Arm(partial(job, **{key: broken}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{key: fixed}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **needs}),
        world_size=ranks,
        deadline_s=40.0 if needs else 20.0,
        expected_s=(2.0, 2.0) if needs else (1.0, 1.0),
    )


LENGTH = raised(r"Length of IterableDataset .* but 17 samples have been fetched\. For multiprocessing data-loading")
REFUSED = raised("you need to add an explicit nodesplitter to your input pipeline for multi-node training")
NO_SEED = raised("The dataset doesn't have a fixed random seed across nodes")
NO_SHARD = raised("No samples found in dataset; perhaps you have fewer shards than workers")
IDLE = symptom(r"Too many dataloader workers: 2 \(max is dataset\.(n|num)_shards=1\)\. Stopping 1 dataloader workers")
WEB, NEW = partial(webdataset, way="one rank", shards=1), {"webdataset": ">=0.2.96"}
ONE_FILE, WORKERS = partial(stream, files=1), partial(datasets, way="workers", workers=2)

probe = Probe(
    experiments=(pair("workers", stream, TWICE, WHOLE, EACH, by=(NEITHER, BOTH)),),
    variants=(
        pair(
            "rank-only",
            stream,
            TWICE,
            "both workers of a rank read all files of that rank",
            EACH,
            by=(("rank",), BOTH),
            ranks=2,
        ),
        pair(
            "worker-only",
            stream,
            TWICE,
            "the same worker of each rank reads the same files",
            EACH,
            by=(("worker",), BOTH),
            ranks=2,
        ),
        pair(
            "one-file",
            ONE_FILE,
            TWICE,
            "every worker reads the whole file",
            "each worker takes its share of the samples",
            by=(NEITHER, BOTH),
        ),
        pair("length", partial(stream, warn=True), LENGTH, WHOLE, EACH, by=(NEITHER, BOTH)),
        pair("own-seed", draw, ONE_SEED, SAME_SEED, OWN_SEED, seed=("one for all", "each"), ranks=2),
        pair("global-seed", draw, SOME, GLOBAL_SEED, OWN_SEED, seed=("global", "each"), ranks=2),
        pair(
            "accelerate",
            prepared,
            TWICE,
            "accelerate divides the stream by rank only",
            "the stream divides its files by worker",
            by=(NEITHER, ("worker",)),
            ranks=2,
            accelerate="",
        ),
        pair(
            "webdataset",
            webdataset,
            REFUSED,
            "webdataset has no nodesplitter for two ranks",
            NODE,
            way=("plain", "split_by_node"),
            **WDS,
        ),
        pair(
            "nodesplitter-none",
            webdataset,
            TWICE,
            "nodesplitter=None splits nothing by rank",
            NODE,
            way=("None", "split_by_node"),
            **NEW,
        ),
        pair(
            "pipeline",
            webdataset,
            FOUR,
            "the pipeline splits neither by rank nor by worker",
            NODE,
            way=("bare pipeline", "pipeline"),
            **WDS,
        ),
        pair("pipeline-shuffle", webdataset, SOME, *SHUFFLES, way=SHUFFLED, **WDS),
        pair(
            "few-shards",
            WEB,
            NO_SHARD,
            "two workers read one shard, so one gets none",
            "one worker reads one shard",
            workers=(2, 1),
            **NEW,
        ),
        pair(
            "datasets",
            datasets,
            TWICE,
            "each rank reads the whole dataset",
            "split_dataset_by_node divides it by rank",
            way=("whole", "split"),
            **HF,
        ),
        pair("datasets-shuffle", datasets, SOME, *SEEDS, way=("shuffle", "shuffle, seed"), datasets=">=4.6"),
        pair("datasets-refuses", datasets, NO_SEED, *SEEDS, way=("shuffle", "shuffle, seed"), datasets=">=2.12,<4.6"),
        pair("datasets-skip", datasets, REST, *SKIPS, way=("split, skip", "skip, split"), datasets=">=2.21,<5.1"),
        pair(
            "datasets-workers",
            WORKERS,
            IDLE,
            "two workers share one file, so datasets stops one",
            "each of two workers has a file",
            files=(1, 2),
            **HF,
        ),
    ),
)

"""The training step waits for its batch: time a loader with its workers against one batch that is already loaded."""

from __future__ import annotations

import multiprocessing
import os
import time
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple

from kb.cpu_arms import without_launcher
from kb.host import cpu_quota, ranks_here
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

STEP_S = 0.02  # that the GPU computes
SAMPLE_S = 0.02  # to read, decode and transform a sample
SAMPLES, STEPS, ROUNDS = 3, 10, 4  # samples in a batch, steps in an epoch, epochs that are measured
# a step is slow if it takes so many times as long as with a loaded batch: a starved step takes 2.5 to 4 times as long,
# another step 1.0 to 1.3 times
SLOW = 1.6
# with the first batch of each epoch included: 5 times as long with new workers, 1.3 to 2 times with persistent ones
RESTART: Dict[str, Any] = {"start_s": 0.8, "slow": 3.0}


class Dataset:
    """Samples that the process which asks for them must prepare."""

    def __init__(self, prepare: Callable[[], None], length: int = SAMPLES * STEPS) -> None:
        self.prepare, self.length = prepare, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.prepare()
        return index


def wait() -> None:
    time.sleep(SAMPLE_S)


def compute() -> None:
    """Uses as much CPU time as `wait` waits; processes that share a core take turns."""
    end = time.thread_time() + SAMPLE_S
    while time.thread_time() < end:
        pass


def nothing() -> None:
    """The sample was prepared before the job."""


def seconds_per_step(batches: Iterable[Any], train_step: Callable[[Any], None], warm: int = 1) -> float:
    """The mean time of a step over `batches`, without the first `warm`, which wait until the workers have started."""
    steps, start = -warm, time.perf_counter()
    for batch in batches:
        train_step(batch)
        steps += 1
        if steps == 0:
            start = time.perf_counter()
    return (time.perf_counter() - start) / steps


def train(
    ctx: Context,
    *,
    num_workers: int = 4,
    prefetch_factor: Optional[int] = None,
    persistent_workers: bool = True,
    prepare: Callable[[], None] = wait,
    cores: int = 0,
    start_s: float = 0.0,
    slow: float = SLOW,
) -> None:
    """Times epochs over a loader and over one loaded batch; the fastest of each counts, as the host may be busy."""
    from torch.utils.data import DataLoader

    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    options: Dict[str, Any] = {
        "num_workers": num_workers,
        "prefetch_factor": prefetch_factor,
        "persistent_workers": persistent_workers and num_workers > 0,
        "multiprocessing_context": "fork" if num_workers else None,
        "worker_init_fn": partial(start_up, start_s),
    }
    loader: Any = DataLoader(Dataset(prepare), batch_size=SAMPLES, **options)
    train_step, seen = training_step(ctx), []

    def step(batch: Any) -> None:
        seen.extend(batch.tolist())
        train_step(batch)

    for batch in loader:  # starts the workers
        step(batch)
    assert sorted(seen) == list(range(SAMPLES * STEPS)), seen
    ctx.reached()
    rounds: List[Tuple[float, float]] = []
    for _ in range(ROUNDS):
        loaded_batch_s = seconds_per_step([batch] * STEPS, train_step)
        rounds.append((seconds_per_step(loader, step, warm=0 if start_s else 1), loaded_batch_s))
    assert len(seen) == (1 + ROUNDS) * SAMPLES * STEPS
    judge(ctx, rounds, slow)


def start_up(seconds: float, worker: int) -> None:
    """Stands for what a worker does once before its first sample: import modules, open files, read an index."""
    time.sleep(seconds)


def training_step(ctx: Context) -> Callable[[Any], None]:
    """A step that keeps the GPU busy for `STEP_S` seconds; without a GPU it sleeps instead."""
    if ctx.device.type != "cuda":
        return lambda _: time.sleep(STEP_S)
    import torch

    weight = torch.randn(1024, 1024, device=ctx.device)

    def step(batch: Any) -> None:
        end = time.perf_counter() + STEP_S
        batch.to(ctx.device)
        while time.perf_counter() < end:
            torch.mm(weight, weight)
            torch.cuda.synchronize()

    return step


def judge(ctx: Context, rounds: List[Tuple[float, float]], slow: float = SLOW) -> None:
    """Raises `Symptom` if the step with the loader takes more than `slow` times as long as with a loaded batch."""
    ctx.note(ms_per_step=[[round(1000 * seconds, 1) for seconds in pair] for pair in rounds])
    ratio = min(loader_s for loader_s, _ in rounds) / min(loaded_batch_s for _, loaded_batch_s in rounds)
    if ratio > slow:
        raise Symptom("a step takes %.1f times as long as with a batch that is already there" % ratio)


def trainer(ctx: Context, *, dataloader_num_workers: int) -> None:
    """The Trainer of transformers uses no workers by default; compares a whole step with its `training_step`."""
    without_launcher()
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            time.sleep(2 * STEP_S)
            return {"loss": (self.weight * x).mean()}

    class Samples(Dataset):
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.tensor([float(super().__getitem__(index))])}

    steps: List[Tuple[float, float]] = []

    class Timed(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = super().training_step(*args, **kwargs)
            steps.append((start, time.perf_counter()))
            return result

    arguments = TrainingArguments(
        output_dir=ctx.path("out"),
        per_device_train_batch_size=2 * SAMPLES,
        max_steps=STEPS,
        dataloader_num_workers=dataloader_num_workers,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    job = Timed(model=Model(), args=arguments, train_dataset=Samples(wait, 2 * SAMPLES * STEPS))
    multiprocessing.set_start_method("fork", force=True)  # DeepSpeed 0.17.1 sets spawn when it is imported: #7347
    ctx.reached()
    job.train()
    assert len(steps) == STEPS
    pairs = [(steps[i][1] - steps[i - 1][1], steps[i][1] - steps[i][0]) for i in range(2, STEPS)]
    judge(ctx, [sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]])  # the last batch is read early


def stream(ctx: Context, *, dispatch_batches: Optional[bool]) -> None:
    """Counts the samples that each rank prepares when accelerate reads a streamed dataset of four shards."""
    from accelerate import Accelerator, DataLoaderConfiguration  # type: ignore[import-not-found]
    from datasets import IterableDataset  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    dist = ctx.init_process_group(timeout_s=60)
    prepared: List[int] = []

    def samples(shards: List[int]) -> Any:
        for shard in shards:
            for index in range(4):
                prepared.append(4 * shard + index)
                yield {"x": 4 * shard + index}

    dataset = IterableDataset.from_generator(samples, gen_kwargs={"shards": [0, 1, 2, 3]})
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch_batches))
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
    ctx.reached()
    seen = [index for batch in loader for index in batch["x"].tolist()]
    counts: List[Any] = [None, None]
    dist.all_gather_object(counts, (len(prepared), len(seen)))
    ctx.note(prepared_and_trained=counts)
    assert [trained for _, trained in counts] == [8, 8], counts
    if counts[1][0] == 0:
        raise Symptom(f"rank 0 prepared {counts[0][0]} samples for both ranks, rank 1 none")
    assert [ready for ready, _ in counts] == [8, 8], counts


def shuffled_stream(ctx: Context, *, seeded: bool) -> None:
    """With dispatch_batches=False, each rank shuffles the stream itself before accelerate divides it."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from datasets import IterableDataset
    from torch.utils.data import DataLoader

    dist = ctx.init_process_group(timeout_s=60)

    def samples(shards: List[int]) -> Any:
        for shard in shards:
            yield {"x": shard}

    stream = IterableDataset.from_generator(samples, gen_kwargs={"shards": list(range(32))})
    if seeded:
        stream = stream.shuffle(seed=42)  # the same on all ranks
    else:
        stream = stream.shuffle(seed=None)
    world_size, num_workers = dist.get_world_size(), 0
    assert stream.n_shards % (world_size * max(1, num_workers)) == 0
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(stream, batch_size=2))
    ctx.reached()
    seen = [index for batch in loader for index in batch["x"].tolist()]
    both: List[Any] = [None, None]
    dist.all_gather_object(both, seen)
    missing = set(range(32)) - set(both[0]) - set(both[1])
    if missing:
        raise Symptom(f"{len(missing)} of 32 samples came to no rank, as many to both")
    assert sorted(both[0] + both[1]) == list(range(32)), both


def iterate(ctx: Context, *, divided: bool) -> None:
    """Two workers read an IterableDataset; they return each sample once only if they divide it."""
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Numbers(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            worker = get_worker_info()
            return iter(range(8)[worker.id :: worker.num_workers] if divided else range(8))

    ctx.reached()
    loader: Any = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    seen = sorted(index for batch in loader for index in batch.tolist())
    if len(seen) > 8:
        raise Symptom(f"{len(seen)} samples in an epoch, of 8 that exist")
    assert seen == list(range(8)), seen


def records(ctx: Context, *, opened: str, parent_reads: bool = False) -> None:
    """Two workers read a file in which each record is its own number; `opened` says who or what opens the file."""
    from torch.utils.data import DataLoader

    path = ctx.path("records")
    with open(path, "wb") as file:
        file.write(bytes(range(128)))

    class Records:
        file: Optional[int] = os.open(path, os.O_RDONLY) if opened == "constructor" else None
        pid = os.getpid()

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Tuple[int, int]:
            if self.file is None or (opened == "process" and self.pid != os.getpid()):
                self.file, self.pid = os.open(path, os.O_RDONLY), os.getpid()
            os.lseek(self.file, index, os.SEEK_SET)
            time.sleep(0.002)  # meanwhile the other worker moves the position that both share
            return index, os.read(self.file, 1)[0]

    dataset: Any = Records()
    if parent_reads:
        assert dataset[0] == (0, 0)
    ctx.reached()
    loader: Any = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    wrong = sum(int((index != value).sum()) for index, value in loader)
    if wrong:
        raise Symptom(f"{wrong} of 64 samples are of another record")


# --- the check: the cores, their quota and the workers that share them ----------------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """How many workers share how many cores? Only a measurement shows whether they are fast enough."""
    try:
        workers, named = number_of_workers(params)
    except UnreadableConfig as error:
        return unknown(str(error))
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 0):
        return unknown("%s is %r, not a number of workers" % (named, workers))
    try:
        allowed = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return unknown("this system does not report which cores a process may use")
    quota, group, stopped = cpu_quota()
    cores = allowed if quota is None else min(float(allowed), quota)
    evidence = [
        "this process may use %d of %d cores" % (allowed, os.cpu_count() or allowed),
        "kb sees no CPU quota of a cgroup" if quota is None else "%s allows the time of %.1f cores" % (group, quota),
    ]
    if stopped > 10:
        evidence.append("the kernel has throttled the cgroup at its CPU quota in %d %% of the periods so far" % stopped)
        return exposed(*evidence, advice="raise the CPU limit of the container, or do less work per sample")
    ranks, source = ranks_here(params["nproc_per_node"])
    if ranks < 0:
        return unknown("nproc_per_node is %d, not a number of ranks" % ranks)
    evidence.append(
        "%d ranks on this host (%s)" % (ranks, source) if ranks else "kb does not know how many ranks run on this host"
    )
    if workers is None:
        advice = "run this where the job runs, with --set num_workers=8 --set nproc_per_node=4 (your own numbers)"
        return unknown(*evidence, "kb does not know the number of workers", advice=advice)
    if workers == 0:
        evidence.append("no workers (%s): the GPU waits while the training process prepares each batch" % named)
        return unknown(
            *evidence, "how much time that costs depends on the samples", advice="measure it as `How to tell` describes"
        )
    evidence.append("%d workers per rank (%s)" % (workers, named))
    together = cores < allowed or allowed == os.cpu_count()  # otherwise each rank may have its own cores
    if workers > cores or (together and ranks * workers > cores):
        shared = "%d workers take turns on these cores whenever they compute" % (
            workers * (ranks if together and ranks else 1)
        )
        return exposed(*evidence, shared, advice="give the job more cores, or do less work per sample")
    if ranks * workers > cores:
        message = (
            "enough if each rank has its own cores, as under Slurm and mpirun; too few if the ranks share these cores"
        )
        return unknown(*evidence, message, advice="compare `taskset -cp PID` of two ranks")
    return unknown(*evidence, "there is a core for each worker; kb did not measure whether the workers keep up")


def number_of_workers(params: Mapping[str, Any]) -> Tuple[Any, str]:
    """The number of workers, or None, and the option that sets it."""
    if params["num_workers"] is not None or params["config"] is None:
        return params["num_workers"], "as given"
    values = read_config(params["config"]).values
    option = next((name for name in ("dataloader_num_workers", "num_workers") if name in values), "")
    return values.get(option), option


GPU = "the GPU: each step sleeps for 20 ms instead; the loader and its workers are real"
SYMPTOM = symptom(r"a step takes (1\.[6-9]|[2-9]|\d\d)\S* times as long as with a batch that is already there")


def experiment(name: str, fails: Any, works: Any, because: str, fix: str, **changes: Any) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, SYMPTOM, because=because, fidelity="stand-in", stands_for=GPU),
        treatment=Arm(works, completed(), because=fix, fidelity="stand-in", stands_for=GPU),
        world_size=1,
        **{"deadline_s": 90, "expected_s": (4.5, 2.5), **changes},
    )


loading = experiment(
    "workers",
    partial(train, num_workers=0),
    partial(train, num_workers=4),
    because="without workers, the training process prepares each batch itself before the step can begin",
    fix="four workers prepare the next batches while the step runs",
)

probe = Probe(
    check=check,
    params={
        "num_workers": Param("int", "number of DataLoader workers per rank"),
        "nproc_per_node": Param("int", "number of ranks on this host (default: from the launcher's variables)"),
        "config": Param("path", "configuration file that sets dataloader_num_workers or num_workers"),
    },
    experiments=(loading.on_gpus(gpus=1, expected_s=(15, 12)), loading),
    variants=(
        experiment(
            "prefetch",
            partial(train, num_workers=1, prefetch_factor=8),
            partial(train, num_workers=4, prefetch_factor=8),
            because="one worker is slower than the step and falls behind, although it may prepare eight batches ahead",
            fix="four workers together are faster than the step",
        ),
        experiment(
            "one-core",
            partial(train, cores=1, prepare=compute),
            partial(train, cores=1, prepare=nothing),
            because="four workers share the only core that the job may use",
            fix="the samples were prepared before the job, so the workers have nothing to compute",
            expected_s=(5.0, 2.5),
        ),
        experiment(
            "restart",
            partial(train, **RESTART, persistent_workers=False),
            partial(train, **RESTART, persistent_workers=True),
            because="every epoch starts new workers, and each has to start up before its first batch",
            fix="persistent_workers=True reuses the workers of the first epoch",
        ),
        Experiment(
            name="iterable",
            control=Arm(
                partial(iterate, divided=False),
                symptom("16 samples in an epoch, of 8 that exist"),
                because="each of the two workers reads the whole IterableDataset, so every sample comes twice",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(iterate, divided=True),
                completed(),
                because="the workers use get_worker_info() to divide the IterableDataset",
                fidelity="cpu",
            ),
            world_size=1,
            deadline_s=60,
        ),
        Experiment(
            name="open-file",
            control=Arm(
                partial(records, opened="constructor"),
                symptom(r"\d+ of 64 samples are of another record"),
                because="the constructor opened the file before the fork, so the workers share its read position",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(records, opened="process"),
                completed(),
                because="each worker opens the file itself at its first read",
                fidelity="cpu",
            ),
            world_size=1,
            deadline_s=60,
        ),
        Experiment(
            name="parent-reads",
            control=Arm(
                partial(records, opened="first read", parent_reads=True),
                symptom(r"\d+ of 64 samples are of another record"),
                because="the first read opens the file, and the parent did that before it forked the workers",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(records, opened="process", parent_reads=True),
                completed(),
                because="a worker opens the file again because its process id differs from the parent's",
                fidelity="cpu",
            ),
            world_size=1,
            deadline_s=60,
        ),
        experiment(
            "trainer",
            partial(trainer, dataloader_num_workers=0),
            partial(trainer, dataloader_num_workers=4),
            because="by default the Trainer uses no workers and prepares each batch between two steps",
            fix="four workers prepare the next batches while the step runs",
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.40", "accelerate": ""}),
            expected_s=(7.0, 7.0),
        ),
        Experiment(
            name="dispatch",
            control=Arm(
                partial(stream, dispatch_batches=None),
                symptom(r"rank 0 prepared \d+ samples for both ranks, rank 1 none"),
                because="by default, rank 0 reads a streamed dataset for all ranks and sends them the batches",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(stream, dispatch_batches=False),
                completed(),
                because="with dispatch_batches=False, each rank reads its own shards",
                fidelity="cpu",
            ),
            needs=Needs(packages={"torch": ">=2.1", "accelerate": ">=1.8.1", "datasets": ">=3.0"}),
            deadline_s=90,
            expected_s=(4.0, 3.0),
        ),
        Experiment(
            name="dispatch-seed",
            control=Arm(
                partial(shuffled_stream, seeded=False),
                symptom(r"\d+ of 32 samples came to no rank, as many to both"),
                because="each rank shuffles the shards without a seed, then takes its part of a different order",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(shuffled_stream, seeded=True),
                completed(),
                because="all ranks shuffle with the same seed, so they divide the same order",
                fidelity="cpu",
            ),
            needs=Needs(packages={"torch": ">=2.1", "accelerate": ">=1.8.1", "datasets": ">=3.0"}),
            deadline_s=90,
            expected_s=(4.0, 3.0),
        ),
    ),
)

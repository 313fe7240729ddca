"""Processes take turns on one core, OpenMP binds a process to one core, and ranks start too many or too few threads."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import multiprocessing
import os
import re
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Tuple

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
    Unavailable,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

PLAY_S, ROUNDS = 0.08, 12
TURNS = 4_000  # hand-overs per round: about 30 on one core, 200,000 on two, between them on two cores that are busy


class Game:
    """Two processes hand a number back and forth without sleeping. On one core it moves only once per time slice.

    If the processes may use several cores, each binds itself to another one, so that the kernel's scheduler has no say.
    """

    def __init__(self) -> None:
        # the number of hand-overs, a flag for each process that has started, and the number of cores they may use
        self.shared = memoryview(mmap.mmap(-1, 32)).cast("q")

    def play(self, me: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[me % len(cores)]})
        self.shared[3] = len(cores)
        self.shared[1 + me] = 1
        deadline = time.monotonic() + 20
        while not self.shared[2 - me] and time.monotonic() < deadline:
            time.sleep(0.001)
        end = time.perf_counter() + PLAY_S
        while time.perf_counter() < end:
            for _ in range(50):
                if self.shared[0] % 2 == me:
                    self.shared[0] += 1
        os.sched_setaffinity(0, cores)


def best(play: Callable[[Game], None]) -> Tuple[int, int]:
    """The most hand-overs of several rounds, and the number of cores.

    On one core three rounds are enough; on more cores a busy machine may need more rounds.
    """
    turns = cores = 0
    for number in range(ROUNDS):
        game = Game()
        play(game)
        turns, cores = max(turns, game.shared[0]), game.shared[3]
        if turns > TURNS or (cores == 1 and number == 2):
            break
    return turns, cores


class Samples:
    """A dataset whose worker has to compute for each sample."""

    def __init__(self, game: Game, length: int) -> None:
        self.game, self.length = game, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.game.play(index)
        return index


def allowed_cores() -> List[int]:
    cores = sorted(os.sched_getaffinity(0))  # above `import torch`
    if len(cores) < 2:
        raise Unavailable("this process may use one core only, so the two arms would not differ")
    return cores


def load(ctx: Context, *, cores: Optional[int], num_workers: int = 2) -> None:
    """A DataLoader whose two workers compute, or whose single worker and training process compute."""
    from torch.utils.data import DataLoader

    os.sched_setaffinity(0, allowed_cores()[:cores])
    ctx.reached()
    texts: List[str] = []

    def play(game: Game) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            samples: Any = Samples(game, num_workers)
            loader: Any = DataLoader(samples, num_workers=num_workers, collate_fn=list, multiprocessing_context="fork")
        texts[:] = [str(warning.message) for warning in caught]
        batches = iter(loader)
        if num_workers == 1:
            game.play(1)
        assert list(batches) == [[number] for number in range(num_workers)]

    turns, allowed = best(play)
    ctx.note(hand_overs=turns, cores=allowed, warnings=texts)
    if turns <= TURNS:
        pattern = r"This DataLoader .*? max number of worker in current system is \d+"
        warned = re.findall(pattern, " ".join(texts)) or ["no warning"]
        raise Symptom("%s; %d cores, took turns: %d hand-overs" % (warned[0], allowed, turns))
    assert allowed >= 2, allowed


def count_workers(ctx: Context, *, affinity: bool) -> None:
    """A job that may use one core starts one worker per core, as os.cpu_count() or its affinity counts the cores."""
    from torch.utils.data import DataLoader

    os.sched_setaffinity(0, allowed_cores()[:1])
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as torchrun sets it
    ctx.reached()
    data: Any = list(range(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        num_workers = os.cpu_count() or 1
        if affinity:
            ranks = int(os.environ["LOCAL_WORLD_SIZE"])  # that share these cores
            num_workers = max(1, len(os.sched_getaffinity(0)) // ranks - 1)
        loader: Any = DataLoader(data, batch_size=2, num_workers=num_workers, multiprocessing_context="fork")
    assert [value for batch in loader for value in batch.tolist()] == data


def load_openmp() -> Any:
    """Loads torch's OpenMP library as `import torch` does. The library reads its variables and binds this thread."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")
    libraries = sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")])
    if not libraries:
        raise Unavailable("no torch with a libgomp of its own is installed")
    return ctypes.CDLL(str(libraries[0]))


def bind(ctx: Context) -> None:
    """A process that has loaded torch's OpenMP library starts two workers."""
    cores = allowed_cores()
    load_openmp()
    ctx.reached()

    def play(game: Game) -> None:
        context = multiprocessing.get_context("fork")
        workers: List[Any] = [context.Process(target=game.play, args=(me,)) for me in range(2)]
        for process in workers:
            process.start()
        for process in workers:
            process.join()

    turns, allowed = best(play)
    ctx.note(hand_overs=turns, cores_before=len(cores), cores_of_workers=allowed)
    if turns <= TURNS:
        raise Symptom("%d cores before OpenMP, %d after; took turns: %d hand-overs" % (len(cores), allowed, turns))
    assert allowed == len(cores), allowed


def launch(ctx: Context, *, threads: str) -> None:
    """torchrun starts two ranks, which record their OMP_NUM_THREADS."""
    from torch.distributed.run import main

    os.environ.pop("OMP_NUM_THREADS", None)
    if threads:
        os.environ["OMP_NUM_THREADS"] = threads
    ctx.reached()
    script = 'printf %s "$OMP_NUM_THREADS" > "$0-$LOCAL_RANK"'
    local = ["--nproc-per-node=2", "--local-addr=localhost", "--master-addr=localhost", "--master-port=0"]
    main([*local, "--no-python", "sh", "-c", script, ctx.path("threads")])
    given = [Path(ctx.path("threads-%d" % rank)).read_text() for rank in range(2)]
    if given != [threads, threads]:
        raise Symptom("OMP_NUM_THREADS was not set, and is %s in the two ranks" % " and ".join(given))


def count_threads(ctx: Context) -> None:
    """How many threads does torch use in a new process if OMP_NUM_THREADS is 2?"""
    allowed_cores()
    script = "import torch; print(torch.backends.mkl.is_available(), torch.get_num_threads())"
    ctx.reached()
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    has_mkl, threads = ran.stdout.split()
    if has_mkl != "True":
        raise Unavailable("this torch is built without MKL")
    if threads != "2":
        raise Symptom("OMP_NUM_THREADS is 2, torch takes %s threads" % threads)


def start_threads(ctx: Context, *, share: bool) -> None:
    """How many threads do two ranks start that may use the same cores?"""
    cores = len(allowed_cores())
    os.environ.pop("OMP_NUM_THREADS", None)
    if share:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // ctx.world_size))
    threads = load_openmp().omp_get_max_threads()
    ctx.reached()
    ctx.note(threads=threads, cores=cores)
    if threads * ctx.world_size > cores:
        raise Symptom("%d ranks of %d threads each for %d cores" % (ctx.world_size, threads, cores))
    assert threads >= 1, threads


# --- the check: cores, quota, and what the ranks of this host start ----------------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Are the cores that this process may use enough for the ranks, their workers and their threads?"""
    workers = params["num_workers"]
    if workers is None and params["config"] is not None:
        try:
            values = read_config(params["config"]).values
        except UnreadableConfig as error:
            return unknown(str(error))
        workers = values.get("dataloader_num_workers", values.get("num_workers"))
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 0):
        return unknown("%r is not a number of workers" % (workers,))
    try:
        allowed = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return unknown("this system does not report which cores a process may use")
    total = os.cpu_count() or allowed
    quota, group, stopped = cpu_quota()
    cores = allowed if quota is None else min(float(allowed), quota)
    ranks, source = ranks_here(params["nproc_per_node"])
    evidence = [
        "this process may use %d of %d cores" % (allowed, total),
        "no cgroup limits the CPU time" if quota is None else "%s limits the CPU time to %.1f cores" % (group, quota),
        "%d ranks on this host (%s)" % (ranks, source) if ranks > 0 else "kb does not know the number of ranks here",
        "kb does not know the number of workers" if workers is None else "%d workers per rank" % workers,
    ]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    evidence.append("OMP_NUM_THREADS is %s" % (ascii(threads) if threads not in ("", "1") else "1 or not set"))
    mkl = os.environ.get("MKL_NUM_THREADS", "")
    evidence += ["MKL_NUM_THREADS is %s, which overrides OMP_NUM_THREADS in torch on x86" % ascii(mkl)] if mkl else []
    places = {name: os.environ.get(name, "") for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")}
    named = ["%s=%s" % (name, ascii(value)) for name, value in places.items() if value]
    evidence += ["OpenMP may bind this process to fewer cores on `import torch`: " + ", ".join(named)] if named else []
    if quota is not None and stopped > 10:
        evidence.append("the kernel throttled the cgroup at its quota in %d %% of the periods so far" % stopped)
        return exposed(*evidence, advice="raise the CPU limit, or use fewer workers or threads")
    together = cores < allowed or allowed == total  # otherwise each rank may have its own cores
    sharing = ranks if together and ranks > 0 else 1
    if workers is not None and sharing * (workers + 1) > cores:
        evidence.append("%d processes share %.1f cores" % (sharing * (workers + 1), cores))
        return exposed(*evidence, advice="request more cores for the job, or use fewer workers")
    if not mkl and re.fullmatch(r"[1-9][0-9]{0,4}", threads) and sharing * int(threads) > cores:
        evidence.append("%d OpenMP threads share %.1f cores" % (sharing * int(threads), cores))
        return exposed(*evidence, advice="set OMP_NUM_THREADS to the number of cores divided by the number of ranks")
    later = "kb cannot see to which cores the launcher or OpenMP will bind a rank"
    return unknown(*evidence, later, advice="`taskset -cp PID` of a running rank")


def arms(name: str, fails: Any, works: Any, why: str, fix: str, expect: Any, **changes: Any) -> Experiment:
    """`changes` holds `stands_for` for both arms, `env` as a pair for the two arms, and fields of the experiment."""
    common = {"fidelity": "stand-in" if "stands_for" in changes else "cpu", "stands_for": changes.pop("stands_for", "")}
    control, treatment = changes.pop("env", ({}, {}))
    return Experiment(
        name=name,
        control=Arm(fails, expect, because=why, env=control, **common),
        treatment=Arm(works, completed(), because=fix, env=treatment, **common),
        **{"world_size": 1, "deadline_s": 60.0, **changes},
    )


WARNING = (
    r"This DataLoader will create \d+ worker processes in total\. "
    r"Our suggested max number of worker in current system is 1"
)
GOMP = {"stands_for": "`import torch`; here the job loads only torch's OpenMP library", "needs": Needs(packages={})}
BIND = {"OMP_PROC_BIND": "true"}
TWO = {"OMP_NUM_THREADS": "2", "MKL_DYNAMIC": "FALSE"}  # otherwise MKL never uses more threads than physical cores

probe = Probe(
    check=check,
    params={
        "num_workers": Param("int", "DataLoader workers per rank"),
        "nproc_per_node": Param("int", "ranks on this host (default: from the launcher's variables)"),
        "config": Param("path", "a configuration file with dataloader_num_workers or num_workers"),
    },
    experiments=(
        arms(
            "one-core",
            partial(load, cores=1),
            partial(load, cores=None),
            "the job may use one core only, so its two workers take turns",
            "the job may use all cores, so its two workers compute at the same time",
            symptom(WARNING + r"; 1 cores, took turns: \d+ hand-overs"),
        ),
    ),
    variants=(
        arms(
            "as-suggested",
            partial(load, cores=1, num_workers=1),
            partial(load, cores=None, num_workers=1),
            "a single worker, as torch suggests, stops the warning but takes turns with the training process",
            "the job may use all cores, so the worker and the training process compute at the same time",
            symptom(r"no warning; 1 cores, took turns: \d+ hand-overs"),
        ),
        arms(
            "count",
            partial(count_workers, affinity=False),
            partial(count_workers, affinity=True),
            "the script counts cores with os.cpu_count(), which includes those that the job may not use",
            "the script counts cores with os.sched_getaffinity, which are those that the job may use",
            raised(WARNING),
        ),
        arms(
            "openmp",
            bind,
            bind,
            "OMP_PROC_BIND=true makes OpenMP bind the process to one core on import, and the workers inherit that",
            "without OMP_PROC_BIND the process and its workers keep all cores",
            symptom(r"([2-9]|\d\d+) cores before OpenMP, 1 after; took turns"),
            env=(BIND, {}),
            **GOMP,
        ),
        arms(
            "torchrun",
            partial(launch, threads=""),
            partial(launch, threads="2"),
            "OMP_NUM_THREADS is not set, so torchrun sets it to 1 for two ranks",
            "OMP_NUM_THREADS is set before torchrun starts, and the ranks inherit it",
            symptom("OMP_NUM_THREADS was not set, and is 1 and 1 in the two ranks"),
        ),
        arms(
            "mkl",
            count_threads,
            count_threads,
            "MKL_NUM_THREADS=1 overrides OMP_NUM_THREADS=2 in torch",
            "without MKL_NUM_THREADS torch uses the value of OMP_NUM_THREADS",
            symptom("OMP_NUM_THREADS is 2, torch takes 1 threads"),
            env=({**TWO, "MKL_NUM_THREADS": "1"}, TWO),
        ),
        arms(
            "threads",
            partial(start_threads, share=False),
            partial(start_threads, share=True),
            "OMP_NUM_THREADS is not set, so each of the two ranks starts one thread per core",
            "OMP_NUM_THREADS is the number of cores divided by the number of ranks",
            symptom(r"2 ranks of (\d+) threads each for \1 cores"),
            world_size=2,
            **{**GOMP, "stands_for": "torch.get_num_threads(); here the job asks torch's OpenMP library"},
        ),
    ),
)

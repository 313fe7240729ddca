"""Ranks and workers copy data that they could share, exceed the memory limit, and the kernel kills one of them.

The data is a checkpoint or the index of a dataset. A watcher thread stands in for the kernel.
"""

import array
import gc
import itertools
import os
import pickle
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.host import file_text
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    clear,
    completed,
    exposed,
    killed,
    raised,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

PROCESSES, MIB, LIMIT_MIB = 3, 48, 100


def train(ctx: Context, *, shared: bool, workers: bool = False, frozen: bool = False) -> None:
    """Three processes read 48 MiB each at the same time, under a common limit of 100 MiB."""
    import torch.multiprocessing as mp

    read = samples(shared) if workers else loader(ctx, shared)
    if frozen:
        gc.freeze()
    measured = ctx.dir / "measured"

    def work(number: int) -> None:
        assert read() == MIB << 17  # words of 8 bytes
        ctx.dir.joinpath("read-%d" % number).touch()
        end = time.monotonic() + 25  # keep the data in memory, as a rank does until its model is on the GPU
        while not (all_have_read(ctx) and measured.exists()) and time.monotonic() < end:
            time.sleep(0.02)

    ctx.reached()
    job = mp.start_processes(work, nprocs=PROCESSES, join=False, start_method="fork")
    threading.Thread(target=watch, args=(ctx, job.pids()), daemon=True).start()
    while not job.join(timeout=15):
        pass
    assert measured.exists(), "the watcher did not add up the memory of all three processes"


def all_have_read(ctx: Context) -> bool:
    return len(list(ctx.dir.glob("read-*"))) == PROCESSES


def loader(ctx: Context, shared: bool) -> Callable[[], int]:
    """Loads a checkpoint into the memory of the process, or maps it from the file."""
    import torch

    def build() -> Any:
        model: Any = torch.nn.Module()
        model.embed, model.head = torch.nn.Module(), torch.nn.Module()
        model.embed.weight = model.head.weight = torch.nn.Parameter(torch.empty(MIB << 17, dtype=torch.float64))
        return model

    path = ctx.path("model.pt")
    weight = torch.ones(MIB << 17, dtype=torch.float64)
    torch.save({"embed.weight": weight, "head.weight": weight}, path)
    models: List[Any] = []

    def read() -> int:
        with torch.device("meta"):
            model = build()
        made = {name: weight.dtype for name, weight in model.named_parameters()}
        if shared:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state, assign=True)
        assert {name: weight.dtype for name, weight in model.named_parameters()} != made, (
            "the tied weights did not come apart"
        )
        model.head.weight = model.embed.weight
        if {name: weight.dtype for name, weight in model.named_parameters()} != made:
            raise RuntimeError("weights came apart, or have another dtype in the file")
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise RuntimeError("something is not in the file and still on meta")
        models.append(model)
        return int(model.embed.weight.sum())

    return read


def save_again(ctx: Context, *, new_file: bool) -> None:
    """Saves a model whose weights are mapped from a file, under the name of that file."""
    import torch

    path = ctx.path("model.pt")
    torch.save({"weight": torch.ones(1024, 1024)}, path)
    with torch.device("meta"):
        model = torch.nn.Linear(1024, 1024, bias=False)
    model.load_state_dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True), assign=True)
    ctx.reached()
    if new_file:
        torch.save(model.state_dict(), path + ".new")
        os.replace(path + ".new", path)
    else:
        torch.save(model.state_dict(), path)
    assert torch.load(path, weights_only=True)["weight"].sum() == model.weight.sum() == 1 << 20


def samples(shared: bool) -> Callable[[], int]:
    """A dataset's index, made before the fork: strings, whose reference counts change when read, or one object."""
    rows: Any = ["%01024d" % number for number in range(MIB << 10)]
    if not shared:
        return lambda: sum(len(row) for row in rows) >> 3
    rows = [pickle.dumps(row) for row in rows]
    ends = array.array("q", itertools.accumulate(map(len, rows)))
    rows = b"".join(rows)

    def read() -> int:
        total = 0
        for i in range(len(ends)):
            row = pickle.loads(rows[ends[i - 1] if i else 0 : ends[i]])
            total += len(row)
        return total >> 3

    return read


def watch(ctx: Context, pids: List[int]) -> None:
    """Does what the kernel does: adds up the private memory of the processes, and kills the largest above the limit."""
    most = 0
    while not ctx.dir.joinpath("measured").exists():
        is_last = all_have_read(ctx)
        sizes = {pid: private_kib(pid) for pid in pids}
        most = max(most, sum(sizes.values()) >> 10)
        ctx.note(mib_private_of_all=most, limit_mib=LIMIT_MIB)
        if most > LIMIT_MIB:
            os.kill(max(pids, key=lambda pid: sizes[pid]), signal.SIGKILL)
            return
        if is_last:
            ctx.dir.joinpath("measured").touch()
        time.sleep(0.01)


def private_kib(pid: int) -> int:
    match = re.search(r"Private_Dirty:\s+(\d+)", file_text("/proc/%d/smaps_rollup" % pid))
    return int(match.group(1)) if match else 0


# --- the check: the limit of this process, earlier kills under that limit, and what the job needs ----------------


def check(params: Mapping[str, Any]) -> Finding:
    limit, free, kills = limits()
    if not (limit and free):
        return unknown("/proc/meminfo does not say how much memory this machine has")
    evidence = ["%.1f of %.1f GiB are free" % (free, limit)]
    host = meminfo("MemTotal")
    if limit < host * 0.98:
        evidence[0] += " in this container or job; it cannot use the host's %.0f GiB, which psutil and htop show" % host
    need, most, message = needed(params)
    if message:
        evidence.append(message)
    if kills:
        evidence.append("the kernel has already killed %d processes of this cgroup for memory" % kills)
    if need > free:
        return exposed(*evidence, advice="share or map the data that ranks load, offload less, or request more memory")
    if kills:
        return exposed(*evidence, advice="look for the killed process: dmesg -T | grep -i 'killed process'")
    if most > free * 0.7:
        return unknown(*evidence, "little memory is left for pinned buffers, data, workers and other jobs")
    granted = granted_by_slurm()
    if granted and max(need, most) > granted * 0.7:
        evidence.append("Slurm granted this job %.1f GiB on the node, and may kill it above that" % granted)
        return unknown(*evidence, advice="request more memory with --mem, or make the job need less")
    if need > 0:
        return clear(*evidence, "pinned buffers, data and workers need memory as well")
    return unknown(*evidence, advice="--set per_rank_gib=N --set ranks=N, or --set config=ds.json --set billions=7")


def needed(params: Mapping[str, Any]) -> Tuple[float, float, str]:
    """GiB that the job needs, at least and at most, and the calculation; 0 without information about the job."""
    ranks = params["ranks"]
    if params["per_rank_gib"] is not None:
        need = ranks * params["per_rank_gib"]
        return need, need, "%d ranks x %g GiB = %g GiB" % (ranks, params["per_rank_gib"], need)
    if params["config"] is None:
        return 0, 0, ""
    try:
        kind, values = read_config(params["config"])
    except UnreadableConfig as error:
        return 0, 0, str(error)
    if kind != "deepspeed":
        return 0, 0, "%s is not a DeepSpeed configuration" % params["config"]
    zero = values.get("zero_optimization")
    billions = params["billions"]
    if not isinstance(zero, dict) or not offloaded(zero, "optimizer"):
        return 0, 0, "%s does not offload the optimizer to the CPU" % params["config"]
    if billions is None:
        return 0, 0, "the job offloads its optimizer to the CPU: --set billions=N gives the model's parameters in 10^9"
    least = 18 if offloaded(zero, "param") else 16
    whole = max(4 * ranks, least)  # if each rank makes the whole model before DeepSpeed splits it
    if zero.get("stage") != 3:
        least = whole = max(4 * ranks, 16)
    need, most = (billions * 1e9 * bytes_each * 1.5 / (1 << 30) for bytes_each in (least, whole))
    message = "%g x 10^9 parameters x %d bytes x 1.5 = %.0f GiB on one node, by DeepSpeed's own estimate" % (
        billions,
        least,
        need,
    )
    if whole > least:
        message += "; %.0f GiB if each rank makes the whole model before DeepSpeed splits it" % most
    return need, most, message


def offloaded(zero: Dict[str, Any], what: str) -> bool:
    offload = zero.get("offload_" + what)
    return isinstance(offload, dict) and offload.get("device") == "cpu"


def limits() -> Tuple[float, float, int]:
    """The tightest limit of this process in GiB, the GiB that are free, and the kills of this cgroup."""
    host, free, kills = meminfo("MemTotal"), meminfo("MemAvailable"), 0
    limit = host
    for path in re.findall(r"^\d+:(?:.*memory.*)?:(/.*)$", file_text("/proc/self/cgroup"), re.M):
        for root, most, now in (
            ("/sys/fs/cgroup", "memory.max", "memory.current"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            for group in [Path(root + path), *Path(root + path).parents]:
                at_most, used = number(group / most), number(group / now)
                if at_most is None or used is None or at_most >= host:
                    continue
                cache = re.search(r"^(?:total_)?inactive_file (\d+)", file_text(group / "memory.stat"), re.M)
                used -= int(cache.group(1)) / (1 << 30) if cache else 0
                # an outer group may have less memory free, because other jobs are in it too
                limit, free = min(limit, at_most), min(free, at_most - used)
            # in a container /sys/fs/cgroup is the container's group, and the path may be one of the host
            folder = root + path if Path(root + path).is_dir() else root
            events = "\n".join(map(file_text, (folder + "/memory.events", folder + "/memory.oom_control")))
            count = re.search(r"^oom_kill (\d+)", events, re.M)
            kills = max(kills, int(count.group(1)) if count else 0)
    return limit, free, kills


def granted_by_slurm() -> float:
    """GiB of this Slurm job on this node, which the accounting may enforce without a cgroup; 0 if unknown or all."""
    words = [os.environ.get("SLURM_" + name, "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")]
    node, cpu, cpus = (int(word) if word.isdigit() else 0 for word in words)
    return (node or cpu * cpus) / 1024


def number(path: Path) -> Optional[float]:
    text = file_text(path)
    return int(text) / (1 << 30) if text.isdigit() else None


def meminfo(name: str) -> float:
    match = re.search(r"%s:\s+(\d+) kB" % name, file_text("/proc/meminfo"))
    return int(match.group(1)) / (1 << 20) if match else 0


COPIES = "three processes each load the same 48 MiB into their own memory, under a limit of 100 MiB"
LISTED = "three forked workers copy a list of 48 MiB by reading its strings, under a limit of 100 MiB"
WATCHER = "the kernel's OOM killer; a watcher thread of the probe kills the process"


def experiment(name: str, because: str, fix: str, **options: Any) -> Experiment:
    terminated = raised(r"process \d+ terminated with signal SIGKILL")
    control, treatment = partial(train, shared=False, **options), partial(train, shared=True, **options)
    return Experiment(
        name=name,
        control=Arm(control, terminated, because=because, fidelity="stand-in", stands_for=WATCHER),
        treatment=Arm(treatment, completed(), because=fix, fidelity="stand-in", stands_for=WATCHER),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1"}),
        deadline_s=60,
        expected_s=(0.6, 0.6),
    )


MAPPED = "the three processes map the same file with torch.load(mmap=True)"
PACKED = "the index is one bytes object of pickled rows with an array of offsets, so reading copies nothing"

probe = Probe(
    check=check,
    params={
        "config": Param("path", "your DeepSpeed configuration, for the check"),
        "billions": Param("float", "number of parameters of your model in 10^9, for the check"),
        "per_rank_gib": Param("float", "GiB that one rank loads into host memory at a time, for the check"),
        "ranks": Param("int", "ranks on this machine, for the check", 8),
    },
    experiments=(experiment("watched", COPIES, MAPPED),),
    variants=(
        experiment("index", LISTED, PACKED, workers=True),
        experiment(
            "gc-freeze",
            "gc.freeze() ran before the fork, but three workers copy a list of 48 MiB by reading its strings",
            "gc.freeze() ran before the fork, and the index is one bytes object of pickled rows",
            workers=True,
            frozen=True,
        ),
        Experiment(
            name="saved-over",
            control=Arm(
                partial(save_again, new_file=False),
                killed("SIGBUS"),
                because="torch.save empties the file that the weights are mapped from",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(save_again, new_file=True),
                completed(),
                because="torch.save writes a new file, which os.replace renames; the mapping keeps the old file",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=60,
        ),
    ),
)

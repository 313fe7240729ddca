"""Ranks and workers that each make a copy of what they could share exceed the memory limit, and one is killed.

A checkpoint, or the index of a dataset. A watcher acts as the kernel.
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
    """Three processes read 48 MiB each, all at the same time, under a limit of 100 MiB for all of them."""
    import torch.multiprocessing as mp

    read = samples(shared) if workers else loader(ctx, shared)
    if frozen:
        gc.freeze()
    weighed = ctx.dir / "weighed"

    def work(number: int) -> None:
        assert read() == MIB << 17  # words of 8 bytes
        ctx.dir.joinpath("read-%d" % number).touch()
        end = time.monotonic() + 25  # all hold what they have read, as ranks do until the model is on the GPU
        while not (all_have_read(ctx) and weighed.exists()) and time.monotonic() < end:
            time.sleep(0.02)

    ctx.reached()
    job = mp.start_processes(work, nprocs=PROCESSES, join=False, start_method="fork")
    threading.Thread(target=watch, args=(ctx, job.pids()), daemon=True).start()
    while not job.join(timeout=15):
        pass
    assert weighed.exists(), "nobody added up the memory of all three"


def all_have_read(ctx: Context) -> bool:
    return len(list(ctx.dir.glob("read-*"))) == PROCESSES


def loader(ctx: Context, shared: bool) -> Callable[[], int]:
    """A checkpoint that every process loads: into memory of its own, or mapped from the file."""
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
        assert {name: weight.dtype for name, weight in model.named_parameters()} != made, "each was assigned by itself"
        model.head.weight = model.embed.weight
        if {name: weight.dtype for name, weight in model.named_parameters()} != made:
            raise RuntimeError("weights came apart, or have another dtype in the file")
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise RuntimeError("something is not in the file and still on meta")
        models.append(model)
        return int(model.embed.weight.sum())

    return read


def save_again(ctx: Context, *, beside: bool) -> None:
    """A model whose weights are mapped from a file is saved under the name of that file."""
    import torch

    path = ctx.path("model.pt")
    torch.save({"weight": torch.ones(1024, 1024)}, path)
    with torch.device("meta"):
        model = torch.nn.Linear(1024, 1024, bias=False)
    model.load_state_dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True), assign=True)
    ctx.reached()
    if beside:
        torch.save(model.state_dict(), path + ".new")
        os.replace(path + ".new", path)
    else:
        torch.save(model.state_dict(), path)
    assert torch.load(path, weights_only=True)["weight"].sum() == model.weight.sum() == 1 << 20


def samples(shared: bool) -> Callable[[], int]:
    """A dataset's index, made before the fork: strings, whose reference counts a reader writes, or one object."""
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
    """Act as the kernel: add up the private memory of these processes, and kill the largest beyond the limit."""
    most = 0
    while not ctx.dir.joinpath("weighed").exists():
        is_last = all_have_read(ctx)
        sizes = {pid: private_kib(pid) for pid in pids}
        most = max(most, sum(sizes.values()) >> 10)
        ctx.note(mib_private_of_all=most, limit_mib=LIMIT_MIB)
        if most > LIMIT_MIB:
            os.kill(max(pids, key=lambda pid: sizes[pid]), signal.SIGKILL)
            return
        if is_last:
            ctx.dir.joinpath("weighed").touch()
        time.sleep(0.01)


def private_kib(pid: int) -> int:
    match = re.search(r"Private_Dirty:\s+(\d+)", file_text("/proc/%d/smaps_rollup" % pid))
    return int(match.group(1)) if match else 0


# --- the check: the limit that counts here, whether it has killed before, and a sum --------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    limit, free, kills = limits()
    if not (limit and free):
        return unknown("/proc/meminfo does not say how much memory this machine has")
    evidence = ["%.1f of %.1f GiB are free" % (free, limit)]
    host = meminfo("MemTotal")
    if limit < host * 0.98:
        evidence[0] += " in this container or job; the host's %.0f GiB, which psutil and htop show, do not count" % host
    need, most, message = needed(params)
    if message:
        evidence.append(message)
    if kills:
        evidence.append("the kernel has killed %d processes of this cgroup for memory already" % kills)
    if need > free:
        return exposed(*evidence, advice="share or map what is loaded, offload less, or ask for more memory")
    if kills:
        return exposed(*evidence, advice="look for the victim: dmesg -T | grep -i 'killed process'")
    if most > free * 0.7:
        return unknown(*evidence, "that leaves little: pinned buffers, data, workers and other jobs come on top")
    if need > 0:
        return clear(*evidence, "pinned buffers, data and workers come on top")
    return unknown(*evidence, advice="--set per_rank_gib=N --set ranks=N, or --set config=ds.json --set billions=7")


def needed(params: Mapping[str, Any]) -> Tuple[float, float, str]:
    """GiB that the job needs, at least and at most, and how that was computed; 0 without information about the job."""
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
        return 0, 0, "%s is not a configuration of DeepSpeed" % params["config"]
    zero = values.get("zero_optimization")
    billions = params["billions"]
    if not isinstance(zero, dict) or not offloaded(zero, "optimizer"):
        return 0, 0, "%s offloads no optimizer to the CPU" % params["config"]
    if billions is None:
        return (
            0,
            0,
            "optimizer states are offloaded to the CPU: --set billions=N says how many parameters the model has",
        )
    least = 18 if offloaded(zero, "param") else 16
    whole = max(4 * ranks, least)  # each rank makes the whole model before it is split
    if zero.get("stage") != 3:
        least = whole = max(4 * ranks, 16)
    need, most = (billions * 1e9 * bytes_each * 1.5 / (1 << 30) for bytes_each in (least, whole))
    message = "%g x 10^9 parameters x %d bytes x 1.5 = %.0f GiB by DeepSpeed's own estimate, one node" % (
        billions,
        least,
        need,
    )
    if whole > least:
        message += "; %.0f GiB if each rank makes the whole model first" % most
    return need, most, message


def offloaded(zero: Dict[str, Any], what: str) -> bool:
    offload = zero.get("offload_" + what)
    return isinstance(offload, dict) and offload.get("device") == "cpu"


def limits() -> Tuple[float, float, int]:
    """GiB of the tightest limit of this process, GiB free under it, and how many processes it has killed."""
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
                # a wider group may be the fuller one: other jobs are in it too
                limit, free = min(limit, at_most), min(free, at_most - used)
            # in a container /sys/fs/cgroup is the container's own group, and the path may be that of the host
            folder = root + path if Path(root + path).is_dir() else root
            events = "\n".join(map(file_text, (folder + "/memory.events", folder + "/memory.oom_control")))
            count = re.search(r"^oom_kill (\d+)", events, re.M)
            kills = max(kills, int(count.group(1)) if count else 0)
    return limit, free, kills


def number(path: Path) -> Optional[float]:
    text = file_text(path)
    return int(text) / (1 << 30) if text.isdigit() else None


def meminfo(name: str) -> float:
    match = re.search(r"%s:\s+(\d+) kB" % name, file_text("/proc/meminfo"))
    return int(match.group(1)) / (1 << 20) if match else 0


COPIES = "three processes make a copy of the same 48 MiB each, under a limit of 100 MiB"
LISTED = "three workers, forked, read a list of strings, and so copy it, under a limit of 100 MiB"
PLAYED = "the kernel's OOM killer, which a watcher of ours plays"


def experiment(name: str, because: str, fix: str, **words: Any) -> Experiment:
    terminated = raised(r"process \d+ terminated with signal SIGKILL")
    control, treatment = partial(train, shared=False, **words), partial(train, shared=True, **words)
    return Experiment(
        name=name,
        control=Arm(control, terminated, because=because, fidelity="stand-in", stands_for=PLAYED),
        treatment=Arm(treatment, completed(), because=fix, fidelity="stand-in", stands_for=PLAYED),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1"}),
        deadline_s=60,
        expected_s=(0.6, 0.6),
    )


MAPPED = "the same three processes map it from the file: torch.load(mmap=True)"
PACKED = "the index is one object, pickled rows in a bytes object with the offsets beside it"

probe = Probe(
    check=check,
    params={
        "config": Param("path", "your DeepSpeed configuration, for the check"),
        "billions": Param("float", "parameters of your model in 10^9, for the check"),
        "per_rank_gib": Param("float", "what one rank loads into memory at a time in GiB, for the check"),
        "ranks": Param("int", "ranks on this machine, for the check", 8),
    },
    experiments=(experiment("watched", COPIES, MAPPED),),
    variants=(
        experiment("index", LISTED, PACKED, workers=True),
        experiment(
            "gc-freeze",
            LISTED + "; gc.freeze() came first",
            PACKED + "; gc.freeze() as well",
            workers=True,
            frozen=True,
        ),
        Experiment(
            name="saved-over",
            control=Arm(
                partial(save_again, beside=False),
                killed("SIGBUS"),
                because="torch.save empties the file from which the weights are still read",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(save_again, beside=True),
                completed(),
                because="the new file takes the name once it is whole; the old one stays until nobody maps it",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=60,
        ),
    ),
)

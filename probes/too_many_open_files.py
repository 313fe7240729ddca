"""Every tensor that a worker sent holds a descriptor open in the parent, as long as the tensor exists.

Batches that a loop keeps, or batches of many tensors that wait to be used.
"""

import gc
import os
import re
import resource
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Tuple

from kb.cpu_arms import share_by_file_system
from kb.probe import Arm, Context, Experiment, Finding, Param, Probe, completed, exposed, raised, unknown

KEEPS = ("batch", "numpy", "clone")


SHARE = """
import torch

torch.multiprocessing.set_sharing_strategy("file_system")

class Rows(list):
    pass
"""


def evaluate(
    ctx: Context,
    *,
    keep: str,
    by_file_system: bool = False,
    in_workers: bool = False,
    start: str = "fork",
    raise_limit: bool = False,
    gc_too: bool = False,
) -> None:
    """Collect what the loader gives, as an evaluation loop does with predictions, labels or ids."""
    from torch.utils.data import DataLoader

    assert keep in KEEPS, keep
    limit = ctx.params["limit"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if by_file_system:
        share_by_file_system()
    if raise_limit:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    opened_before = len(os.listdir("/proc/self/fd"))
    ctx.reached()
    options: Dict[str, Any] = {"multiprocessing_context": start}
    rows: Any = [{"labels": float(row)} for row in range(2 * limit)]
    if in_workers:
        (ctx.dir / "share.py").write_text(SHARE)
        sys.path.insert(0, str(ctx.dir))  # a worker that is not forked imports it from there
        rows = import_module("share").Rows(rows)
    labels: List[Any] = []
    for number, batch in enumerate(DataLoader(rows, num_workers=1, **options), 1):
        if keep == "clone":
            labels.append(batch["labels"].clone())
        else:
            labels.append(batch["labels"].numpy() if keep == "numpy" else batch["labels"])
        if gc_too:
            gc.collect()
        if number == 40:
            ctx.note(descriptors_more_after_40_batches=len(os.listdir("/proc/self/fd")) - opened_before)
    assert sum(label.item() for label in labels) == sum(range(2 * limit))


RECEIVED, TENSORS = 256, 40  # the limit of the process that receives, and the tensors of a batch


class Slow:
    """Batches of many small tensors. The first takes a while, so that those of other workers arrive before it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> Any:
        import torch

        if row == 0:
            time.sleep(2.0)
        return [torch.tensor([float(row)]) for _ in range(TENSORS)]


def load(ctx: Context, *, stacked: bool = False, workers: int = 4, prefetch: int = 2, cloned: bool = False) -> None:
    """Use the batches one by one and keep none. Those that arrive early wait in the loader."""
    import torch
    from torch.utils.data import DataLoader

    batches = iter(
        DataLoader(
            Slow(),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch,
            collate_fn=torch.stack if stacked else None,
            multiprocessing_context="fork",
        )
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (RECEIVED, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ctx.reached()
    kept = [[tensor.clone() for tensor in batch] for batch in batches] if cloned else []
    total = sum(float(sum(tensor.item() for tensor in batch)) for batch in (kept or batches))
    assert total == TENSORS * sum(range(len(Slow()))), total


def synchronise(ctx: Context, *, destroyed: bool) -> None:
    """A gloo group for each epoch, as a loader over a data pipe makes one to agree on a seed."""
    dist = ctx.init_process_group(timeout_s=10)
    limit = ctx.params["limit"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ctx.reached()
    for _ in range(limit // 2):
        group = dist.new_group(backend="gloo")
        dist.barrier(group)
        if destroyed:
            dist.destroy_process_group(group)
        del group
        gc.collect()


def check(params: Mapping[str, Any]) -> Finding:
    """How close is a process to its limit, and what does it hold open? Without a process: the limit of a new job."""
    pid = params["pid"]
    if pid is None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        message = (
            f"a job started from here may open {soft} files per process (ulimit -n), and raise that to {hard} itself"
        )
        advice = "--set pid=PID, the training process, tells how much of it is used"
        return unknown(message, "what a job needs depends on what it keeps", advice=advice)
    try:
        soft, kinds = open_files(Path(f"/proc/{pid}"))
    except (OSError, ValueError) as error:
        return unknown(f"process {pid} cannot be looked into, it may be gone or belong to somebody else: {error}")
    used = sum(kinds.values())
    evidence = [f"process {pid} has {used} of {soft} descriptors open"]
    evidence += [f"{number} are {kind}" for kind, number in kinds.most_common(4)]
    if used > soft * 0.7:
        kind = kinds.most_common(1)[0][0]
        advice = "close them, or raise ulimit -n"
        if "tensors" in kind:
            advice = "if they grow: clone what the loop keeps; if not: stack tensors in collate_fn, or fewer workers"
        return exposed(*evidence, advice=advice)
    advice = "look again in a minute: it is the growth that matters; workers are processes of their own"
    return unknown(*evidence, "it is below 70 % of its limit now", advice=advice)


def open_files(process: Path) -> Tuple[int, "Counter[str]"]:
    limits = re.search(r"Max open files\s+(\d+)", (process / "limits").read_text())
    if limits is None:
        raise ValueError("its limit of open files is not a number")
    kinds: "Counter[str]" = Counter()
    for descriptor in (process / "fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except OSError:  # closed meanwhile, or not ours to read
            kinds["that cannot be read"] += 1
            continue
        if name.startswith("/dev/shm/torch_"):
            kinds["tensors in shared memory, sent by workers"] += 1
        elif name.startswith("/"):
            kinds["files such as %s" % re.sub(r"\d+", "N", Path(name).name)[:40]] += 1
        else:
            kinds[name.split(":")[0] + "s"] += 1
    return int(limits.group(1)), kinds


MESSAGES = (
    r"Too many open files\. Communication with the workers is no longer possible"
    r"|received 0 items of ancdata|Errno 24\] Too many open files|enforce fail at .{1,200}Too many open files"
)
RETAINED = "the loop keeps each batch as the worker sent it, and the limit is lower than their number"
WAITING = "six batches of 40 tensors from three workers wait for the first of the fourth; the limit is 256 files"
CLONED = "the loop keeps a copy of each batch"
STACKED = "the same batches, each stacked into one tensor by the worker"


def experiment(
    name: str, control: Callable[[Context], None], because: str, treatment: Callable[[Context], None], fix: str
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, expect=raised(MESSAGES), because=because, fidelity="cpu"),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity="cpu"),
        world_size=1,
        deadline_s=60,
        expected_s=(1.0, 2.0),
    )


keep = partial(evaluate, keep="batch")
clone = partial(evaluate, keep="clone")
stack = partial(load, stacked=True)

FORK_SERVER = replace(
    experiment(
        "fork-server",
        partial(evaluate, keep="batch", by_file_system=True, start="forkserver"),
        "the parent alone has the strategy file_system; a worker of a fork server does not inherit it",
        partial(evaluate, keep="batch", by_file_system=True, in_workers=True, start="forkserver"),
        "the module of the dataset sets it, which the worker imports too",
    ),
    deadline_s=150,  # its worker imports torch afresh
    expected_s=(8.0, 9.0),
)

probe = Probe(
    check=check,
    params={
        "limit": Param("int", "the limit of open files in the experiment", 96),
        "pid": Param("int", "a running training process that the check looks into"),
    },
    experiments=(experiment("dataloader", keep, RETAINED, clone, CLONED),),
    variants=(
        experiment(
            "numpy",
            partial(evaluate, keep="numpy"),
            "the loop keeps .numpy() of each batch, which is no copy",
            clone,
            CLONED,
        ),
        experiment(
            "gc",
            partial(evaluate, keep="batch", gc_too=True),
            RETAINED + "; gc.collect() each time",
            partial(evaluate, keep="clone", gc_too=True),
            CLONED + "; gc.collect() each time",
        ),
        experiment(
            "limit",
            keep,
            RETAINED,
            partial(evaluate, keep="batch", raise_limit=True),
            "the soft limit is raised, within the hard one",
        ),
        experiment(
            "file-system",
            keep,
            RETAINED,
            partial(evaluate, keep="batch", by_file_system=True),
            "the strategy file_system: names instead of descriptors",
        ),
        FORK_SERVER,
        experiment("in-flight", load, WAITING, stack, STACKED),
        experiment(
            "clone-in-flight",
            partial(load, cloned=True),
            WAITING + "; each is cloned",
            partial(load, stacked=True, cloned=True),
            STACKED,
        ),
        experiment(
            "workers",
            load,
            WAITING,
            partial(load, workers=1),
            "one worker: batches come in order, and none waits in the receiving process",
        ),
        experiment("prefetch", load, WAITING, partial(load, prefetch=1), "each worker is one batch ahead, not two"),
        experiment(
            "groups",
            partial(synchronise, destroyed=False),
            "a gloo group is made each epoch and only dropped; its pipes and sockets stay open",
            partial(synchronise, destroyed=True),
            "each group is destroyed before the next is made",
        ),
    ),
)

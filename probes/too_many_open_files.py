"""Each tensor from a worker holds a file descriptor open in the parent, as long as the tensor exists.

The process reaches its limit because the loop keeps batches, or because batches of many tensors wait in the loader.
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
    """Collects the labels of each batch, as an evaluation loop does; `keep` is what it appends to its list."""
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
        sys.path.insert(0, str(ctx.dir))  # a worker that is not forked imports share.py from there
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


RECEIVER_LIMIT, TENSORS = 256, 40  # open files of the receiving process, and tensors per batch


class SlowFirstBatch:
    """Batches of many small tensors; the first one is slow, so that those of other workers arrive before it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> Any:
        import torch

        if row == 0:
            time.sleep(2.0)
        return [torch.tensor([float(row)]) for _ in range(TENSORS)]


def load(ctx: Context, *, stacked: bool = False, workers: int = 4, prefetch: int = 2, cloned: bool = False) -> None:
    """Uses the batches one by one and keeps none, unless `cloned`; batches that arrive early wait in the loader."""
    import torch
    from torch.utils.data import DataLoader

    batches = iter(
        DataLoader(
            SlowFirstBatch(),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch,
            collate_fn=torch.stack if stacked else None,
            multiprocessing_context="fork",
        )
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (RECEIVER_LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ctx.reached()
    kept = [[tensor.clone() for tensor in batch] for batch in batches] if cloned else []
    total = sum(float(sum(tensor.item() for tensor in batch)) for batch in (kept or batches))
    assert total == TENSORS * sum(range(len(SlowFirstBatch()))), total


def synchronise(ctx: Context, *, destroyed: bool) -> None:
    """Creates a gloo group per epoch, as a loader over a data pipe does to agree on a seed."""
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
    """How close is a process to its limit, and what does it hold open? Without a process, the limit of a new job."""
    pid = params["pid"]
    if pid is None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        message = f"a job started from here may open {soft} files per process (ulimit -n), and may raise that to {hard}"
        advice = "run --set pid=PID with the training process, to see how many it has open"
        return unknown(message, "how many a job needs depends on what it keeps", advice=advice)
    try:
        soft, kinds = open_files(Path(f"/proc/{pid}"))
    except (OSError, ValueError) as error:
        return unknown(f"kb cannot read process {pid}, which may be gone or belong to another user: {error}")
    used = sum(kinds.values())
    evidence = [f"process {pid} has {used} of {soft} descriptors open"]
    evidence += [f"{number} are {kind}" for kind, number in kinds.most_common(4)]
    if used > soft * 0.7:
        kind = kinds.most_common(1)[0][0]
        advice = "close them, or raise ulimit -n"
        if "tensors" in kind:
            advice = "if they grow, clone what the loop keeps; if not, stack tensors in collate_fn or use fewer workers"
        return exposed(*evidence, advice=advice)
    advice = "look again in a minute, because the growth matters; check the workers too, which are separate processes"
    return unknown(*evidence, "it is now below 70 % of its limit", advice=advice)


def open_files(process: Path) -> Tuple[int, "Counter[str]"]:
    """The soft limit of a process, and its descriptors counted by kind; raises OSError or ValueError."""
    limits = re.search(r"Max open files\s+(\d+)", (process / "limits").read_text())
    if limits is None:
        raise ValueError("its limit of open files is not a number")
    kinds: "Counter[str]" = Counter()
    for descriptor in (process / "fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except OSError:  # it was closed in the meantime, or belongs to another user
            kinds["unreadable"] += 1
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
RETAINED = "the loop keeps each batch as the worker sent it, and there are more batches than the limit of open files"
WAITING = "six batches of 40 tensors from three workers wait for a batch of the fourth; the limit is 256 files"
CLONED = "the loop keeps a copy of each batch"
STACKED = "the worker stacks each batch into one tensor"


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
        "only the parent sets the strategy file_system, and a worker of a fork server does not inherit it",
        partial(evaluate, keep="batch", by_file_system=True, in_workers=True, start="forkserver"),
        "the module of the dataset sets the strategy, and the worker imports that module too",
    ),
    deadline_s=150,  # a worker that is not forked imports torch itself
    expected_s=(8.0, 9.0),
)

probe = Probe(
    check=check,
    params={
        "limit": Param("int", "limit of open files in the experiment", 96),
        "pid": Param("int", "a running training process, for the check"),
    },
    experiments=(experiment("dataloader", keep, RETAINED, clone, CLONED),),
    variants=(
        experiment(
            "numpy",
            partial(evaluate, keep="numpy"),
            "the loop keeps .numpy() of each batch, which is not a copy",
            clone,
            CLONED,
        ),
        experiment(
            "gc",
            partial(evaluate, keep="batch", gc_too=True),
            RETAINED + "; it calls gc.collect() after each",
            partial(evaluate, keep="clone", gc_too=True),
            CLONED + "; it calls gc.collect() after each",
        ),
        experiment(
            "limit",
            keep,
            RETAINED,
            partial(evaluate, keep="batch", raise_limit=True),
            "the script raises the soft limit, up to the hard limit",
        ),
        experiment(
            "file-system",
            keep,
            RETAINED,
            partial(evaluate, keep="batch", by_file_system=True),
            "the strategy file_system shares tensors by name instead of by descriptor",
        ),
        FORK_SERVER,
        experiment("in-flight", load, WAITING, stack, STACKED),
        experiment(
            "clone-in-flight",
            partial(load, cloned=True),
            WAITING + "; the loop clones each tensor",
            partial(load, stacked=True, cloned=True),
            STACKED,
        ),
        experiment(
            "workers",
            load,
            WAITING,
            partial(load, workers=1),
            "there is one worker, so batches arrive in order and none waits in the receiving process",
        ),
        experiment("prefetch", load, WAITING, partial(load, prefetch=1), "each worker prefetches one batch, not two"),
        experiment(
            "groups",
            partial(synchronise, destroyed=False),
            "the job creates a gloo group per epoch and destroys none, so their pipes and sockets stay open",
            partial(synchronise, destroyed=True),
            "the job destroys each group before it creates the next",
        ),
    ),
)

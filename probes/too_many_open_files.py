"""Every tensor that a worker sent holds a descriptor open in the parent, as long as the tensor exists.

Batches that a loop keeps, or batches of many tensors that wait to be used. `fix` chooses what the treatment arm does
about the former.
"""

import os
import re
import resource
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Param, Probe, clear, completed, exposed, raised, unknown

FIXES = ("clone", "file_system", "limit")


def evaluate(ctx: Context, *, fixed: bool) -> None:
    """Collect what the loader gives, as an evaluation loop does with predictions, labels or ids."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    fix, limit = ctx.params["fix"] if fixed else "", ctx.params["limit"]
    assert ctx.params["fix"] in FIXES, "fix is one of %s" % ", ".join(FIXES)
    batches = 2 * limit
    if fix == "file_system":
        torch.multiprocessing.set_sharing_strategy("file_system")
    now = 2 * batches if fix == "limit" else limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (now, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    opened_before = len(os.listdir("/proc/self/fd"))
    ctx.reached()
    batches_seen = []
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.arange(float(batches))), num_workers=1), 1):
        batches_seen.append(batch.clone() if fix == "clone" else batch)
        if number == 40:
            ctx.note(descriptors_more_after_40_batches=len(os.listdir("/proc/self/fd")) - opened_before, limit=now)
    assert torch.cat(batches_seen).sum().item() == sum(range(batches))


RECEIVED, TENSORS = 256, 60  # the limit of the process that receives, and the tensors of a batch


class Slow:
    """Batches of many small tensors. The first takes a while, so that those of other workers arrive before it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> Any:
        import torch

        if row == 0:
            time.sleep(1.0)
        return [torch.tensor([float(row)]) for _ in range(TENSORS)]


def load(ctx: Context, *, stacked: bool = False, workers: int = 4) -> None:
    """Use the batches one by one and keep none. Those that arrive early wait in the loader."""
    import torch
    from torch.utils.data import DataLoader

    batches = iter(
        DataLoader(
            Slow(),
            batch_size=None,
            num_workers=workers,
            collate_fn=torch.stack if stacked else None,
            multiprocessing_context="fork",
        )
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (RECEIVED, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ctx.reached()
    total = sum(float(sum(tensor.item() for tensor in batch)) for batch in batches)
    assert total == TENSORS * sum(range(len(Slow()))), total


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
    except (OSError, AttributeError):
        return unknown(f"there is no process {pid} here, or it belongs to somebody else")
    used = sum(kinds.values())
    evidence = [f"process {pid} has {used} of {soft} descriptors open"]
    evidence += [f"{number} are {kind}" for kind, number in kinds.most_common(4)]
    if used > soft * 0.7:
        kind = kinds.most_common(1)[0][0]
        advice = "clone what the loop keeps of a batch" if "tensors" in kind else "close them, or raise ulimit -n"
        return exposed(*evidence, advice=advice)
    if used > soft * 0.3:
        return unknown(*evidence, advice="look again in a minute: it is the growth that matters")
    return clear(*evidence, "it is far from its limit now")


def open_files(process: Path) -> Tuple[int, "Counter[str]"]:
    limits = re.search(r"Max open files\s+(\d+)", (process / "limits").read_text())
    assert limits
    kinds: "Counter[str]" = Counter()
    for descriptor in (process / "fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except OSError:
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
    r"|received 0 items of ancdata|Errno 24\] Too many open files"
)
RETAINED = "the loop keeps each batch as the worker sent it, and the limit is lower than their number"
WAITING = "six batches of 60 tensors from three workers wait for the first of the fourth; the limit is 256 files"
FREED = "the same loop without a descriptor per kept batch (--set fix=clone, file_system or limit)"

probe = Probe(
    check=check,
    params={
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "clone"),
        "limit": Param("int", "the limit of open files in the experiment", 96),
        "pid": Param("int", "a running training process that the check looks into"),
    },
    experiments=(
        Experiment(
            name="dataloader",
            control=Arm(partial(evaluate, fixed=False), expect=raised(MESSAGES), because=RETAINED, fidelity="cpu"),
            treatment=Arm(partial(evaluate, fixed=True), expect=completed(), because=FREED, fidelity="cpu"),
            world_size=1,
            deadline_s=30,
            expected_s=(0.4, 0.5),
        ),
    ),
    variants=(
        Experiment(
            name="in-flight",
            control=Arm(load, expect=raised(MESSAGES), because=WAITING, fidelity="cpu"),
            treatment=Arm(
                partial(load, stacked=True),
                expect=completed(),
                because="the same batches, each stacked into one tensor by the worker",
                fidelity="cpu",
            ),
            world_size=1,
            deadline_s=60,
            expected_s=(1.0, 3.0),
        ),
        Experiment(
            name="workers",
            control=Arm(load, expect=raised(MESSAGES), because=WAITING, fidelity="cpu"),
            treatment=Arm(
                partial(load, workers=1),
                expect=completed(),
                because="one worker: batches come in order, and none waits in the receiving process",
                fidelity="cpu",
            ),
            world_size=1,
            deadline_s=60,
            expected_s=(1.0, 3.0),
        ),
    ),
)

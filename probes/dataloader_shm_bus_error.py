"""Batches that workers have ready wait in /dev/shm for the parent, and it is too small for them.

The arms get their own /dev/shm, in a user and mount namespace, and leave the machine's alone.
"""

import os
import time
from functools import partial
from typing import Any, List, Mapping

from kb.namespaces import own_user, tmpfs_over
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Param,
    Probe,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)

FIXES = ("shm-size", "in-flight")
SHM_MIB, BATCH_MIB, WORKERS, PREFETCH = 8, 2, 2, 4


def train(ctx: Context, *, fixed: bool) -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    fix = ctx.params["fix"] if fixed else ""
    assert ctx.params["fix"] in FIXES, "fix is one of %s" % ", ".join(FIXES)

    class Images(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            return torch.full((BATCH_MIB << 18,), float(index))

    own_user()
    tmpfs_over("/dev/shm", 64 if fix == "shm-size" else SHM_MIB)
    workers, prefetch = (1, 1) if fix == "in-flight" else (WORKERS, PREFETCH)
    ctx.note(mib_of_shared_memory=size_and_free()[0] >> 20, mib_ready_at_most=workers * prefetch * BATCH_MIB)
    ctx.reached()
    seen: List[float] = []
    for batch in DataLoader(Images(), batch_size=1, num_workers=workers, prefetch_factor=prefetch):
        seen.append(batch[0, -1].item())
        if len(seen) == 1:
            time.sleep(0.5)  # a step on the GPU takes longer than loading: the workers get ahead
    assert seen == list(range(10))


def size_and_free() -> Any:
    """Total and free bytes of /dev/shm."""
    space = os.statvfs("/dev/shm")
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def check(params: Mapping[str, Any]) -> Finding:
    """Is /dev/shm of this machine or container large enough for the batches that may wait in it?"""
    try:
        size, free = size_and_free()
        stale = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    except OSError as error:
        return unknown(f"/dev/shm cannot be read: {error}")
    evidence = [f"/dev/shm has {size >> 20} MiB, {free >> 20} MiB of them free"]
    if stale:
        evidence.append(f"{len(stale)} files torch_* lie in it, of running jobs or left behind by killed ones")
    advice = "docker run --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with medium Memory on /dev/shm"
    if params["batch_mib"] is not None:
        processes, workers, prefetch = params["ranks"], params["workers"], params["prefetch"]
        need = processes * workers * prefetch * params["batch_mib"]
        evidence.append(
            f"{processes} ranks x {workers} workers x {prefetch} batches x {params['batch_mib']:g} MiB = {need:g} MiB"
        )
        if need * (1 << 20) > free:
            return exposed(*evidence, advice=advice)
        return clear(*evidence, "what NCCL and other users of shared memory need comes on top")
    if size <= 64 << 20:
        return exposed(*evidence, "64 MiB is docker's default, a few batches of images", advice=advice)
    return unknown(*evidence, advice="--set batch_mib=N --set workers=N --set ranks=N, as in your job, does the sum")


MESSAGES = (
    r"unable to allocate shared memory\(shm\) for file"
    r"|is killed by signal: Bus error|Unexpected bus error encountered in worker"
)
SMALL = f"{WORKERS * PREFETCH * BATCH_MIB} MiB of batches become ready in {SHM_MIB} MiB of shared memory"
LARGE = "the same loader in 64 MiB of shared memory (or, --set fix=in-flight, with fewer batches ready)"

probe = Probe(
    check=check,
    params={
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "shm-size"),
        "batch_mib": Param("float", "MiB of one batch of your job, for the check"),
        "workers": Param("int", "num_workers of your job, for the check", 8),
        "prefetch": Param("int", "prefetch_factor of your job, for the check", 2),
        "ranks": Param("int", "ranks on this machine, for the check", 8),
    },
    experiments=(
        Experiment(
            name="dataloader",
            control=Arm(partial(train, fixed=False), expect=raised(MESSAGES), because=SMALL, fidelity="cpu"),
            treatment=Arm(partial(train, fixed=True), expect=completed(), because=LARGE, fidelity="cpu"),
            world_size=1,
            deadline_s=30,
            expected_s=(0.6, 0.9),
        ),
    ),
)

"""Batches that workers have prepared wait in /dev/shm for the parent, but /dev/shm is too small for them.

Each arm mounts its own /dev/shm in a user and mount namespace, and leaves that of the machine alone.
"""

import mmap
import os
import time
from functools import partial
from typing import Any, List, Mapping

from kb.cpu_arms import share_by_file_system
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

SHM_MIB, BATCH_MIB, WORKERS, PREFETCH = 8, 2, 2, 4


def train(
    ctx: Context,
    *,
    shm_mib: int = SHM_MIB,
    batch_mib: int = BATCH_MIB,
    workers: int = WORKERS,
    prefetch: int = PREFETCH,
    by_file_system: bool = False,
) -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            return torch.full((batch_mib << 18,), index, dtype=torch.float32)

    own_user()
    tmpfs_over("/dev/shm", shm_mib)
    if by_file_system:
        share_by_file_system()
    ctx.note(mib_of_shared_memory=size_and_free()[0] >> 20, mib_ready_at_most=workers * prefetch * batch_mib)
    ctx.reached()
    seen: List[float] = []
    more = {"prefetch_factor": prefetch} if workers else {}
    for batch in DataLoader(Images(), batch_size=1, num_workers=workers, **more):
        seen.append(batch[0, -1].item())
        if len(seen) == 1:
            time.sleep(0.5)  # a step on the GPU takes longer than loading, so the workers get ahead
    assert seen == list(range(10))


def read_mapped(ctx: Context, *, whole: bool) -> None:
    """The worker maps a file of two pages, and truncates it, unless `whole`, before it reads the second page."""
    from torch.utils.data import DataLoader, Dataset

    path = ctx.path("data.bin")
    with open(path, "wb") as file:
        file.write(bytes(2 * mmap.PAGESIZE))

    class Mapped(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                if not whole:
                    os.truncate(path, 0)
                return data[-1]

    ctx.reached()
    assert [batch.tolist() for batch in DataLoader(Mapped(), num_workers=1)] == [[0]]


def share_otherwise(ctx: Context, *, shm_mib: int) -> None:
    """A worker writes 12 MiB to `multiprocessing.shared_memory`, which reserves no memory for the size of its file."""
    from torch.utils.data import DataLoader, Dataset

    class Cached(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            from multiprocessing.shared_memory import SharedMemory

            cache = SharedMemory(create=True, size=12 << 20)
            memory: Any = cache.buf
            try:
                memory[:] = bytes(12 << 20)
                return int(memory[-1])
            finally:
                memory.release()
                cache.close()
                cache.unlink()

    own_user()
    tmpfs_over("/dev/shm", shm_mib)
    ctx.reached()
    assert [batch.tolist() for batch in DataLoader(Cached(), num_workers=1)] == [[0]]


def start(ctx: Context, *, cleaned: bool) -> None:
    """A killed job left /dev/shm full; the next DataLoader also creates its locks as files there."""
    from torch.utils.data import DataLoader

    own_user()
    tmpfs_over("/dev/shm", 1)
    leftover = "/dev/shm/torch_1394_2747491098_0"
    with open(leftover, "wb") as file:
        file.write(bytes(size_and_free()[1]))
    if cleaned:
        os.remove(leftover)
    ctx.reached()
    dataset: Any = [1, 2]
    assert [batch.item() for batch in DataLoader(dataset, num_workers=1)] == dataset


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
        return unknown(f"kb cannot read /dev/shm: {error}")
    if not size:
        return unknown("/dev/shm reports a size of 0, as a tmpfs without a limit does: memory is then the limit")
    evidence = [f"/dev/shm has {size >> 20} MiB, of which {free >> 20} MiB are free"]
    if stale:
        evidence.append(f"it contains {len(stale)} files torch_*, which running jobs use or killed jobs left behind")
    advice = "docker run --shm-size=16g or --ipc=host; in Kubernetes, mount an emptyDir with medium Memory on /dev/shm"
    if None not in (params["batch_mib"], params["workers"], params["ranks"]):
        processes, workers, prefetch = params["ranks"], params["workers"], params["prefetch"]
        need = processes * workers * prefetch * params["batch_mib"]
        evidence.append(
            f"{processes} ranks x {workers} workers x {prefetch} batches x {params['batch_mib']:g} MiB = {need:g} MiB"
        )
        if not need > 0:
            return unknown(*evidence, "no job has these numbers: all must be greater than 0")
        if need * (1 << 20) > free:
            return exposed(*evidence, advice=advice)
        if need * (1 << 20) > 0.7 * free:
            return unknown(*evidence, "that leaves little for NCCL and other users of shared memory")
        return clear(*evidence, "this counts one loader; a second one, NCCL and other users of shared memory need more")
    if size <= 64 << 20:
        return exposed(*evidence, "64 MiB, the default of docker, holds only a few batches of images", advice=advice)
    return unknown(
        *evidence, advice="give the numbers of your job to compare: --set batch_mib=N --set workers=N --set ranks=N"
    )


MESSAGES = (
    r"unable to allocate shared memory\(shm\) for file"
    r"|is killed by signal: Bus error|Unexpected bus error encountered in worker"
)
SMALL = f"workers prepare {WORKERS * PREFETCH * BATCH_MIB} MiB of batches in {SHM_MIB} MiB of shared memory"


def experiment(name: str, because: str, fix: Mapping[str, Any], fails: str = SMALL, **options: Any) -> Experiment:
    """Both arms have `options`; the treatment arm also has `fix`."""
    control, treatment = partial(train, **options), partial(train, **{**options, **fix})
    return Experiment(
        name=name,
        control=Arm(control, expect=raised(MESSAGES), because=fails, fidelity="cpu"),
        treatment=Arm(treatment, expect=completed(), because=because, fidelity="cpu"),
        world_size=1,
        deadline_s=30,
        expected_s=(0.6, 0.9),
    )


LARGE = {"shm_mib": 64}
ROOM = "the same loader has 64 MiB of shared memory"
ONE = f"one worker prepares a single batch of 12 MiB in {SHM_MIB} MiB of shared memory"

probe = Probe(
    check=check,
    params={
        "batch_mib": Param("float", "size of one batch of your job in MiB, for the check"),
        "workers": Param("int", "num_workers of your job, for the check"),
        "prefetch": Param("int", "prefetch_factor of your job, for the check", 2),
        "ranks": Param("int", "number of ranks on this machine, for the check"),
    },
    experiments=(experiment("dataloader", ROOM, LARGE),),
    variants=(
        experiment("in-flight", "one worker prepares only one batch at a time", {"workers": 1, "prefetch": 1}),
        experiment("no-workers", "with num_workers=0, the batches do not leave the process", {"workers": 0}),
        experiment("file-system", ROOM, LARGE, SMALL + " with the strategy file_system", by_file_system=True),
        experiment("one-worker", ROOM, LARGE, ONE, workers=1, prefetch=1, batch_mib=12),
        Experiment(
            name="other-user",
            control=Arm(
                partial(share_otherwise, shm_mib=SHM_MIB),
                expect=raised(r"is killed by signal: Bus error|Unexpected bus error encountered in worker"),
                because=f"a worker writes 12 MiB to multiprocessing.shared_memory, and /dev/shm has {SHM_MIB} MiB",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(share_otherwise, shm_mib=64), expect=completed(), because="/dev/shm has 64 MiB", fidelity="cpu"
            ),
            world_size=1,
            deadline_s=30,
            expected_s=(0.6, 0.6),
        ),
        Experiment(
            name="leftovers",
            control=Arm(
                partial(start, cleaned=False),
                expect=raised(r"\[Errno 28\] No space left on device"),
                because="a file of a killed job fills /dev/shm, so the loader cannot create its lock there",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(start, cleaned=True),
                expect=completed(),
                because="the file of the killed job is deleted",
                fidelity="cpu",
            ),
            world_size=1,
            deadline_s=30,
            expected_s=(0.6, 0.6),
        ),
        Experiment(
            name="mapped-file",
            control=Arm(
                partial(read_mapped, whole=False),
                expect=raised(r"is killed by signal: Bus error|Unexpected bus error encountered in worker"),
                because="a worker reads a mapped file after its truncation; shared memory has room",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(read_mapped, whole=True),
                expect=completed(),
                because="the mapped file still has both pages",
                fidelity="cpu",
            ),
            world_size=1,
            deadline_s=30,
            expected_s=(0.6, 0.6),
        ),
    ),
)

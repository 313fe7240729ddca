"""A worker of a DataLoader touches memory that it does not have, and dies of SIGSEGV.

A page that children do not inherit (`MADV_DONTFORK`) stands for a library's handle that does not survive a fork;
libibverbs marks registered memory in the same way. The bad pointer of a corrupt record stands for a bug in a decoder.
"""

import ctypes
import faulthandler
import mmap
import os
import sys
from functools import partial
from typing import Any, Callable

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, killed, raised, symptom


def open_database(path: str) -> mmap.mmap:
    pages = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:3] = bytes([5, 6, 7])
    pages.madvise(mmap.MADV_DONTFORK)  # children do not inherit these pages
    return pages


def load(dataset: Any, workers: int) -> Any:
    from torch.utils.data import DataLoader

    context = "fork" if workers else None  # fork is no longer the default in Python 3.14
    try:
        return [batch.item() for batch in DataLoader(dataset, num_workers=workers, multiprocessing_context=context)]
    except RuntimeError as error:
        raise (error.__cause__ or error) from None  # the cause of torch's last error names the signal


def read(ctx: Context, *, close: bool = False, parent_reads: bool = True, workers: int = 1) -> None:
    """The parent reads a sample and may close its database; then a loader reads all samples."""
    dataset = records(guarded=close)
    if parent_reads:
        assert dataset[0] == 5
    if close:
        dataset.close()
    ctx.reached()
    assert load(dataset, workers) == [5, 6, 7]


def records(guarded: bool = False) -> Any:
    """Returns a dataset of three samples; the guarded one refuses a handle that another process opened."""
    from torch.utils.data import Dataset

    class Records(Dataset):  # type: ignore[misc]
        def __init__(self, path: str) -> None:
            self.path = path
            self.database: Any = None

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            if self.database is None:
                self.database, self.pid = open_database(self.path), os.getpid()
            if self.pid != os.getpid():
                raise RuntimeError("opened before the fork: call close() first")
            return self.database[index]

        def close(self) -> None:  # the training process calls it after its last read
            if self.database is not None:
                self.database.close()
            self.database = None

    class UnguardedRecords(Records):
        def __getitem__(self, index: int) -> Any:
            if self.database is None:
                self.database = open_database(self.path)
            return self.database[index]

    return (Records if guarded else UnguardedRecords)("train.db")


def decode(ctx: Context, *, skip: bool, workers: int = 1) -> None:
    """The first of four records is corrupt, and the decoder dereferences the address in it."""
    from torch.utils.data import Dataset, Subset

    class Images(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return len(ctypes.string_at(16, 8)) if index == 0 else 8

    good = [index for index in range(4) if index]
    dataset: Any = Subset(Images(), good) if skip else Images()
    ctx.reached()
    assert load(dataset, workers) == [8, 8, 8]


def trace(ctx: Context, *, restart: bool) -> None:
    """Does the worker print its Python stack? The parent enabled faulthandler; the worker restarts it or not."""
    from torch.utils.data import DataLoader

    def enable_faulthandler(worker_id: int) -> None:
        faulthandler.enable()

    def restart_faulthandler(worker_id: int) -> None:
        faulthandler.disable()  # on since the parent, enable() alone would not install its handlers again
        faulthandler.enable(file=2)

    dataset = records()
    assert dataset[0] == 5
    faulthandler.enable()
    ctx.reached()
    stderr, descriptor = sys.stderr, os.dup(2)
    try:
        with open(ctx.path("stderr"), "a") as log:
            sys.stderr = log
            os.dup2(log.fileno(), 2)
            worker_init_fn = restart_faulthandler if restart else enable_faulthandler
            options: Any = {"num_workers": 1, "multiprocessing_context": "fork"}
            list(DataLoader(dataset, worker_init_fn=worker_init_fn, **options))
    except RuntimeError:
        pass  # the worker's output decides
    finally:
        sys.stderr = stderr
        os.dup2(descriptor, 2)
    with open(ctx.path("stderr"), encoding="utf-8", errors="replace") as file:
        printed = file.read()
    if "Fatal Python error: Segmentation fault" not in printed:
        raise Symptom("the worker died of a segmentation fault without a Python stack, and printed %r" % printed[:80])
    assert "in __getitem__" in printed, printed


DIED = raised(r"DataLoader worker \(pid \d+\) is killed by signal: Segmentation fault")
NO_STACK = symptom(r"without a Python stack, and printed .*Unexpected segmentation fault encountered in worker")
PAGES = "a library's handle that does not survive a fork; the probe uses a page that children do not inherit"
POINTER = "a bug in a decoder that dereferences a bad address; the probe does so with ctypes"


def pair(
    name: str,
    control: Callable[..., None],
    treatment: Callable[..., None],
    because: str,
    fix: str,
    stands_for: str = PAGES,
    expect: Expect = DIED,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, expect, because=because, fidelity="stand-in", stands_for=stands_for),
        treatment=Arm(treatment, completed(), because=fix, fidelity="stand-in", stands_for=stands_for),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1"}),
        deadline_s=30,
        expected_s=(1.2, 1.2),
    )


INHERITED = "the database is open when the loader forks, and the worker uses the inherited handle"
probe = Probe(
    experiments=(
        pair(
            "closed-before-fork",
            partial(read),
            partial(read, close=True),
            because=INHERITED,
            fix="the parent closed the database before the fork, so each process opens it at its first read",
        ),
    ),
    variants=(
        pair(
            "parent-reads",
            partial(read),
            partial(read, parent_reads=False),
            because="the dataset opens the database at its first read, which happened in the parent before the fork",
            fix="the parent reads no sample, so the worker opens the database",
        ),
        pair("no-workers", partial(read), partial(read, workers=0), INHERITED, "the loader has no workers"),
        pair(
            "bad-record",
            partial(decode, skip=False),
            partial(decode, skip=True),
            because="the decoder dereferences an address in a corrupt record",
            fix="the dataset leaves out that record",
            stands_for=POINTER,
        ),
        pair(
            "bad-record-no-workers",
            partial(decode, skip=False, workers=0),
            partial(decode, skip=True, workers=0),
            because="there are no workers, so the corrupt record kills the training process itself",
            fix="the dataset leaves out that record",
            stands_for=POINTER,
            expect=killed("SIGSEGV"),
        ),
        pair(
            "faulthandler",
            partial(trace, restart=False),
            partial(trace, restart=True),
            because="torch replaces the handler inherited from the parent, and enable() in the worker does nothing",
            fix="worker_init_fn disables and enables faulthandler in the worker, after torch set its handlers",
            expect=NO_STACK,
        ),
    ),
)

"""Workers, caches, the training loop and malloc hold more host memory than the job needs.

The probe measures the memory that only one process holds: Private_Dirty in /proc/PID/smaps_rollup.
"""

import ctypes
import gc
import multiprocessing
import os
import pickle
import platform
import random
import time
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, Unavailable, completed, symptom

WORKERS, ROWS, MIB = 2, 16_000, 1 << 20


def own_memory() -> Tuple[int, int]:
    def mib(pid: Optional[int]) -> int:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty:")) >> 10

    workers = [mib(child.pid) for child in multiprocessing.active_children()]
    return mib(os.getpid()), sum(workers)


class Packed:
    """Rows, pickled one by one, in a single tensor."""

    def __init__(self, rows: List[Any]) -> None:
        import torch

        blobs = [pickle.dumps(row) for row in rows]
        self.ends = torch.tensor([0] + [len(blob) for blob in blobs]).cumsum(0)
        self.data = torch.frombuffer(bytearray(b"".join(blobs)), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, i: int) -> Any:
        return pickle.loads(self.data[self.ends[i] : self.ends[i + 1]].numpy())


class PackedBytes(Packed):
    """Rows, pickled one by one, in a single bytes object."""

    def __init__(self, rows: List[Any]) -> None:
        super().__init__(rows)
        self.data, self.ends = bytes(self.data.numpy()), self.ends.tolist()

    def __getitem__(self, i: int) -> Any:
        return pickle.loads(self.data[self.ends[i] : self.ends[i + 1]])


class Decoded:
    """Samples of 64 KiB, which each worker caches in a dict, or reads from one mapped file."""

    def __init__(self, path: str, n: int) -> None:
        self.path, self.n = path, n
        self.table, self.cache = None, {}  # type: Any, Dict[int, Any]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if not self.path:
            if i not in self.cache:
                self.cache[i] = decode(i)
            return self.cache[i]
        import torch

        if self.table is None:
            self.table = torch.from_file(self.path, size=self.n * 65536, dtype=torch.uint8).view(self.n, 65536)
        return self.table[i].clone()

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "table": None}


def decode(i: int) -> Any:
    import torch

    return torch.full((65536,), i % 256, dtype=torch.uint8)


def use(batch: List[Any]) -> int:
    """Reads the whole batch, as a transform does."""
    for sample in batch:
        if isinstance(sample, dict):
            pickle.dumps(sample)
        elif not isinstance(sample, int):
            sample.sum()
    return len(batch)


def held_by_workers(dataset: Any, epochs: int = 1) -> int:
    """MiB of private memory of the workers after some epochs, minus that of workers without data."""
    import torch

    sizes = []
    for data, times in ((range(64), 1), (dataset, epochs)):
        loader = torch.utils.data.DataLoader(
            data,
            batch_size=32,
            shuffle=True,
            num_workers=WORKERS,
            persistent_workers=True,
            multiprocessing_context="fork",
            collate_fn=use,
        )
        for _ in range(times):
            assert sum(loader) == len(data)
        sizes.append(own_memory()[1])
        del loader
        end = time.monotonic() + 10
        while multiprocessing.active_children() and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
    return sizes[1] - sizes[0]


def prepare() -> None:
    """Limits torch to one thread, and checks that the kernel reports private memory."""
    import torch

    torch.set_num_threads(1)
    try:
        own_memory()
    except OSError as error:
        raise Unavailable("the kernel does not report the private memory of a process: %s" % error) from error


def samples() -> List[Dict[str, Any]]:
    """The index of a dataset: for each sample a dict, with about 2.3 KiB of Python objects."""
    return [{"path": "/data/%09d.jpg" % i, "boxes": [float(i + j) for j in range(64)], "id": i} for i in range(ROWS)]


def index(ctx: Context, *, form: str, frozen: bool = False) -> None:
    """Workers read all rows twice in shuffled order."""
    prepare()
    before = own_memory()[0]
    rows: Any = samples()
    size = own_memory()[0] - before
    if form == "arrow" or form == "arrow list":
        import datasets  # type: ignore[import-not-found]

        datasets.Dataset.from_list(rows).save_to_disk(ctx.path("arrow"))
        arrow = datasets.load_from_disk(ctx.path("arrow"))
        assert arrow[7] == rows[7]
        rows = arrow if form == "arrow" else list(arrow)
    elif form != "list":
        packed = (Packed if form == "packed" else PackedBytes)(rows)
        assert packed[0] == rows[0] and packed[len(rows) - 1] == rows[-1] and len(packed) == len(rows)
        rows = packed
    if frozen:
        gc.freeze()
    ctx.reached()
    judge(ctx, "the workers", held_by_workers(rows, epochs=2), size)


def cache(ctx: Context, *, mapped: bool) -> None:
    """Workers read 512 samples for three epochs; each worker decodes them for its cache, or maps the decoded file."""
    import torch

    prepare()
    n, path = 512, ctx.path("decoded.bin")
    if mapped:
        with open(path, "wb") as file:
            for i in range(n):
                file.write(decode(i).numpy().tobytes())
            os.fsync(file.fileno())
        assert torch.equal(Decoded(path, n)[300], decode(300))
    ctx.reached()
    judge(ctx, "the workers' caches", held_by_workers(Decoded(path if mapped else "", n), epochs=3), n * 65536 // MIB)


def keep_samples(ctx: Context, *, clone: bool) -> None:
    """The loop keeps the first sample of each of 4 batches of 34 MiB, as for a preview."""
    import torch

    prepare()
    kept = []
    before = own_memory()[0]
    ctx.reached()
    for batch in (torch.ones(64, 34 << 12) for _ in range(4)):
        if clone:
            kept.append(batch[0].clone())
        else:
            kept.append(batch[0])
    del batch
    assert sum(int(x.sum()) for x in kept) == 4 * (34 << 12)
    judge(ctx, "the loop", own_memory()[0] - before, 4)


def free_tensors(ctx: Context, *, trim: bool) -> None:
    """Frees tensors of 80 to 800 KB below small ones that stay alive, so glibc keeps the pages."""
    import torch

    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        raise Unavailable("torch on this machine may not use the malloc of glibc")
    prepare()
    before, draw = own_memory()[0], random.Random(0)
    large = torch.ones(30 << 18)
    del large  # glibc then serves tensors up to this size from its heap
    freed, kept = [], []
    ctx.reached()
    for _ in range(300):
        freed.append(torch.ones(draw.randrange(20_000, 200_000)))
        kept.append(torch.ones(16))
    del freed
    gc.collect()
    if trim:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    assert len(kept) == 300
    judge(ctx, "malloc", own_memory()[0] - before, 4)


def judge(ctx: Context, holder: str, held: int, size: int) -> None:
    """Raises `Symptom` if `holder` has clearly more private memory than the data needs."""
    ctx.note(mib_held=held, mib_of_the_data=size)
    if held > size + 8:
        raise Symptom("%s hold %d MiB of their own, for %d MiB of data" % (holder, held, size))
    assert held < max(16, size / 3)


def pair(name: str, job: Callable[..., None], because: str, fix: str, arms: Any, **packages: Any) -> Experiment:
    [(key, (broken, fixed))] = arms.items()
    too_much = symptom(
        r"(the workers|the workers' caches|the loop|malloc) hold \d{2,} MiB of their own, for \d+ MiB of data"
    )
    return Experiment(
        name=name,
        control=Arm(partial(job, **{key: broken}), expect=too_much, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{key: fixed}), expect=completed(), because=fix, fidelity="cpu"),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1", **packages}),
        deadline_s=90,
        expected_s=(3, 3),
    )


LISTED = "two forked workers copy a list of dicts by reading it"
ONE = "the rows are pickled into one tensor, so reading copies nothing"
FROZEN = partial(index, frozen=True)
FORM = {"form": ("list", "packed")}

probe = Probe(
    experiments=(pair("index", index, LISTED, ONE, FORM),),
    variants=(
        pair("gc-freeze", FROZEN, LISTED + ", although gc.freeze() ran before the fork", ONE, FORM),
        pair(
            "bytes",
            index,
            LISTED,
            "the rows are pickled into one bytes object, so reading copies nothing",
            {"form": ("list", "bytes")},
        ),
        pair(
            "arrow",
            index,
            "list(dataset) makes a list of dicts, which two forked workers copy by reading it",
            "the workers read the Arrow dataset itself",
            {"form": ("arrow list", "arrow")},
            datasets=">=2.14",
        ),
        pair(
            "cache",
            cache,
            "each worker caches the samples that it decodes",
            "all workers map one file of decoded samples",
            {"mapped": (False, True)},
        ),
        pair(
            "slice",
            keep_samples,
            "the loop keeps a slice of each batch, which keeps the whole batch in memory",
            "the loop keeps a clone of the slice, so the batch is freed",
            {"clone": (False, True)},
        ),
        pair(
            "malloc",
            free_tensors,
            "glibc keeps the pages of freed tensors below small ones that are alive",
            "malloc_trim returns the freed pages to the kernel",
            {"trim": (False, True)},
        ),
    ),
)

"""What workers, caches, the training loop and malloc hold in host memory, beyond what the job needs.

Linux counts what a process alone has written: Private_Dirty, in /proc/PID/smaps_rollup.
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
    """The same in a bytes object."""

    def __init__(self, rows: List[Any]) -> None:
        super().__init__(rows)
        self.data, self.ends = bytes(self.data.numpy()), self.ends.tolist()

    def __getitem__(self, i: int) -> Any:
        return pickle.loads(self.data[self.ends[i] : self.ends[i + 1]])


class Decoded:
    """Samples of 64 KiB, kept by each worker in a dict, or read from one mapped file."""

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
    """Read all of it, as a transform does."""
    for sample in batch:
        if isinstance(sample, dict):
            pickle.dumps(sample)
        elif not isinstance(sample, int):
            sample.sum()
    return len(batch)


def held_by_workers(dataset: Any, epochs: int = 1) -> int:
    """MiB that the workers alone hold after some epochs, beyond what workers without data hold."""
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


def start() -> None:
    import torch

    torch.set_num_threads(1)
    try:
        own_memory()
    except OSError as error:
        raise Unavailable("the kernel does not say what a process alone holds: %s" % error) from error


def samples() -> List[Dict[str, Any]]:
    """The index of a dataset: per sample a dict, about 2.3 KiB of Python objects."""
    return [{"path": "/data/%09d.jpg" % i, "boxes": [float(i + j) for j in range(64)], "id": i} for i in range(ROWS)]


def index(ctx: Context, *, form: str, frozen: bool = False) -> None:
    """Workers read all rows twice, in shuffled order."""
    start()
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
    """Three epochs over samples that are decoded once."""
    import torch

    start()
    n, path = 512, ctx.path("decoded.bin")
    if mapped:
        with open(path, "wb") as file:
            for i in range(n):
                file.write(decode(i).numpy().tobytes())
            os.fsync(file.fileno())
        assert torch.equal(Decoded(path, n)[300], decode(300))
    ctx.reached()
    judge(ctx, "the workers' caches", held_by_workers(Decoded(path if mapped else "", n), epochs=3), n * 65536 // MIB)


def keep(ctx: Context, *, clone: bool) -> None:
    """A loop keeps the first sample of each batch, as for a preview. 4 batches of 34 MiB."""
    import torch

    start()
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


def freed(ctx: Context, *, trim: bool) -> None:
    """Tensors of 80 to 800 KB are freed, but small ones above them are alive. glibc keeps the pages."""
    import torch

    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        raise Unavailable("torch on this machine may have another malloc than that of glibc")
    start()
    before, draw = own_memory()[0], random.Random(0)
    large = torch.ones(30 << 18)
    del large  # glibc then serves tensors up to this size from its heap
    gone, kept = [], []
    ctx.reached()
    for _ in range(300):
        gone.append(torch.ones(draw.randrange(20_000, 200_000)))
        kept.append(torch.ones(16))
    del gone
    gc.collect()
    if trim:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    assert len(kept) == 300
    judge(ctx, "malloc", own_memory()[0] - before, 4)


def judge(ctx: Context, what: str, held: int, size: int) -> None:
    ctx.note(mib_held=held, mib_of_the_data=size)
    if held > size + 8:
        raise Symptom("%s hold %d MiB of their own, for %d MiB of data" % (what, held, size))
    assert held < max(16, size / 3)


def pair(name: str, job: Callable[..., None], because: str, fix: str, arms: Any, **words: Any) -> Experiment:
    [(key, (broken, fixed))] = arms.items()
    seen = symptom(
        r"(the workers|the workers' caches|the loop|malloc) hold \d{2,} MiB of their own, for \d+ MiB of data"
    )
    return Experiment(
        name=name,
        control=Arm(partial(job, **{key: broken}), expect=seen, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{key: fixed}), expect=completed(), because=fix, fidelity="cpu"),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1", **words}),
        deadline_s=90,
        expected_s=(3, 3),
    )


LISTED, ONE = "two forked workers read a list of dicts, and so copy it", "the rows are pickled into one tensor"
FROZEN = partial(index, frozen=True)
FORM = {"form": ("list", "packed")}

probe = Probe(
    experiments=(pair("index", index, LISTED, ONE, FORM),),
    variants=(
        pair("gc-freeze", FROZEN, LISTED + " after gc.freeze()", ONE, FORM),
        pair("bytes", index, LISTED, "the rows are pickled into one bytes object", {"form": ("list", "bytes")}),
        pair(
            "arrow", index, "list(dataset)", "the dataset itself", {"form": ("arrow list", "arrow")}, datasets=">=2.14"
        ),
        pair("cache", cache, "each worker caches what it decodes", "one file, mapped", {"mapped": (False, True)}),
        pair("slice", keep, "a slice keeps the batch", "a clone keeps itself", {"clone": (False, True)}),
        pair("malloc", freed, "glibc keeps what is free", "malloc_trim returns it", {"trim": (False, True)}),
    ),
)

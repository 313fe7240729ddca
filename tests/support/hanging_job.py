"""A gloo job in which one rank hangs in a chosen way until a file exists; then it ends well: `python FILE KIND FOLDER`.

At the end each rank prints the result of its all-reduce, writes `done-RANK` and exits with 0.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
CULPRIT = 1
ADDRESS = f"tcp://127.0.0.1:{os.environ.get('PORT') or os.environ.get('MASTER_PORT')}"


def is_released() -> bool:
    return (FOLDER / "release").exists()


def sleeping() -> None:
    while not is_released():
        time.sleep(1)  # so that a stack is hardly ever taken in between


def spinning() -> None:
    while not is_released():
        sum(range(20_000))


def reading_a_pipe() -> None:
    os.read(os.open(FOLDER / "pipe", os.O_RDWR), 1)  # the test writes a byte


def locking_a_file() -> None:
    with open(FOLDER / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # rank 0 holds it until the release


def waiting_for_a_thread() -> None:
    lock = threading.Lock()

    def hold() -> None:
        with lock:
            is_held.set()
            sleeping()

    is_held = threading.Event()
    threading.Thread(target=hold, daemon=True).start()
    is_held.wait()
    lock.acquire()


def waiting_for_a_command() -> None:
    subprocess.run(["bash", "-c", f"until test -e {FOLDER}/release; do sleep 0.1; done"], check=True)


class Slow(Dataset[int]):  # type: ignore[misc]  # mypy does not read torch
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            self.decode()
        return index

    def decode(self) -> None:
        sleeping()


def loading_data() -> None:
    for _ in DataLoader(Slow(), num_workers=2):
        pass


HELD = """\
#include <unistd.h>
void hold(const char *release) { if (vfork() == 0) { while (access(release, F_OK)) usleep(100000); _exit(0); } }
"""


def in_uninterruptible_sleep() -> None:
    """vfork holds the parent in state D until its child ends."""
    (FOLDER / "held.c").write_text(HELD)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", FOLDER / "held.so", FOLDER / "held.c"], check=True)
    ctypes.CDLL(str(FOLDER / "held.so")).hold(os.fsencode(FOLDER / "release"))


WAYS = {
    "sleeping": sleeping,
    "spinning": spinning,
    "pipe": reading_a_pipe,
    "lock": locking_a_file,
    "thread": waiting_for_a_thread,
    "command": waiting_for_a_command,
    "loader": loading_data,
    "disk-sleep": in_uninterruptible_sleep,
    "stopped": sleeping,  # the test stops the process
    "shell": sleeping,
    "spawn": sleeping,
}


def evaluate(kind: str, rank: int) -> float:
    """Take part in the all-reduce, which the culprit reaches late; in `divergent` it first calls another collective."""
    if kind == "divergent" and rank == CULPRIT:
        return gather_metrics(kind, rank)
    if kind == "missing-peer" and rank == CULPRIT:
        receive(kind)
    elif rank == CULPRIT:
        WAYS[kind]()
    return add_up()


def gather_metrics(kind: str, rank: int) -> float:
    """Wait in a collective of another group until the release, since gloo's collectives do not use the store."""
    dist.monitored_barrier(PAIR[0], timeout=timedelta(seconds=600))
    return add_up()


def receive(kind: str) -> None:
    dist.recv(torch.zeros(1), src=0, tag=7)


def add_up() -> float:
    values = torch.ones(4)
    dist.all_reduce(values)
    return float(values[0])


PAIR: list[Any] = []  # the group of rank 0 and the culprit, once it exists


def run(rank: int, size: int, kind: str, address: str) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    PAIR.append(dist.new_group([0, CULPRIT]))
    if rank == 0:
        threading.Thread(target=answer, args=(kind, locked() if kind == "lock" else None), daemon=True).start()
    add_up()
    (FOLDER / f"ready-{rank}").write_text(str(os.getpid()))
    total = evaluate(kind, rank)
    sys.stdout.write(f"rank {rank} sum {total}\n")
    (FOLDER / f"done-{rank}").write_text(str(total))
    dist.barrier()
    dist.destroy_process_group()


def locked() -> IO[str]:
    file = (FOLDER / "lock").open("w")  # locked as long as it is open
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def answer(kind: str, lock: IO[str] | None) -> None:
    """After the release, let rank 0 do what the culprit waits for."""
    sleeping()
    if lock:
        lock.close()
    if kind == "divergent":
        dist.monitored_barrier(PAIR[0], timeout=timedelta(seconds=60))
    elif kind == "missing-peer":
        dist.send(torch.zeros(1), dst=CULPRIT, tag=7)


def running(rank: int, size: int, address: str) -> None:
    """Run a healthy job until the release, and write the time of each step to `steps-RANK`."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    weights = torch.rand(200, 200)
    times = []
    (FOLDER / f"ready-{rank}").write_text(str(os.getpid()))
    stop = torch.zeros(1)
    while not stop.item():
        began = time.monotonic()
        for _ in range(20):
            weights = torch.tanh(weights @ weights)
        dist.all_reduce(weights)
        stop = torch.tensor([float(rank == 0 and is_released())])
        dist.all_reduce(stop)
        times.append(f"{time.time():.3f} {time.monotonic() - began:.5f}")
    (FOLDER / f"steps-{rank}").write_text("\n".join(times))
    (FOLDER / f"done-{rank}").write_text("4.0")
    dist.destroy_process_group()


def main() -> None:
    kind = sys.argv[1]
    torch.set_num_threads(1)
    if kind == "spawn" and "RANK" not in os.environ:
        size = int(os.environ["SIZE"])
        mp.spawn(run, args=(size, kind, ADDRESS), nprocs=size)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    running(rank, size, ADDRESS) if kind == "running" else run(rank, size, kind, ADDRESS)


if __name__ == "__main__":
    main()

"""Start `hanging_job`, wait until its ranks hang, release it, and check that it ends well."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.console import wait_for

JOB = Path(__file__).with_name("hanging_job.py")
CULPRIT = 1
KINDS = (
    "sleeping", "spinning", "stopped", "divergent", "missing-peer", "pipe", "lock", "thread", "command", "loader",
    "disk-sleep", "shell", "spawn",
)  # fmt: skip
SETTLED_S = 1.0  # until all ranks wait in the collective
READY_S = 120.0


def state(pid: int) -> str:
    """The state of a process, a letter as in ps(1)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@dataclass
class HangingJob:
    """A job that hangs: its processes in the order of their start, and the `pids` of the ranks once they are ready."""

    kind: str
    folder: Path
    size: int
    before: Sequence[Sequence[str]] = ()  # prefix of each rank's command, for instance to enter a node
    address: str = "127.0.0.1"  # in the environment; the ranks meet on this machine
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: int((self.folder / f"ready-{rank}").read_text()) for rank in range(self.size)}

    def start(self) -> None:
        os.mkfifo(self.folder / "pipe")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {
            **self.environment,
            "PORT": port,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        common = {name: value for name, value in common.items() if name not in ("RANK", "WORLD_SIZE")}
        if self.kind == "spawn":
            del common["MASTER_ADDR"], common["MASTER_PORT"]
            self._open({**common, "SIZE": str(self.size)}, "all")
        else:
            for rank in range(self.size):
                environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)}
                self._open({**common, **environment}, str(rank), self.before[rank] if self.before else ())

    def _open(self, environment: dict[str, str], name: str, before: Sequence[str] = ()) -> None:
        command = [*before, sys.executable, str(JOB), self.kind, str(self.folder)]
        if self.kind == "shell":
            command = ["bash", "-c", f"{' '.join(command)}; exit $?"]
        with (self.folder / f"log-{name}").open("wb") as log:
            self.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def wait_until_it_hangs(self) -> None:
        def is_ready() -> bool:
            assert all(process.poll() in (None, 0) for process in self.processes), self.logs()
            return all((self.folder / f"ready-{rank}").exists() for rank in range(self.size))

        wait_for(is_ready, "the ranks", READY_S)
        time.sleep(SETTLED_S)
        if self.kind == "stopped":
            os.kill(self.pids[CULPRIT], signal.SIGSTOP)
            wait_for(lambda: state(self.pids[CULPRIT]) == "T", "the rank to stop")

    def release(self) -> None:
        if self.kind == "stopped":
            os.kill(self.pids[CULPRIT], signal.SIGCONT)
        (self.folder / "release").touch()
        if self.kind == "pipe":
            os.write(os.open(self.folder / "pipe", os.O_RDWR), b"x")

    def end_well(self, seconds: float = 60.0) -> None:
        """Release the job, and check that every rank has the right sum and every process exits with 0."""
        self.release()
        deadline = time.monotonic() + seconds
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        assert codes == [0] * len(codes), self.logs()
        sums = {(self.folder / f"done-{rank}").read_text() for rank in range(self.size)}
        assert sums == {str(float(self.size if self.kind != "running" else 4))}, self.logs()

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("log-*")))

    def end(self) -> None:
        """Kill whatever is left, by pid."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for rank in range(0 if self.before else self.size):  # pids of a node end with it
            try:
                os.kill(int((self.folder / f"ready-{rank}").read_text()), signal.SIGKILL)
            except (OSError, ValueError):
                continue


@contextmanager
def hanging_job(
    kind: str,
    folder: Path,
    size: int = 3,
    before: Sequence[Sequence[str]] = (),
    address: str = "127.0.0.1",
    environment: Mapping[str, str] = os.environ,
) -> Iterator[HangingJob]:
    """A job that hangs, until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    job = HangingJob(kind, folder, size, before, address, environment)
    try:
        job.start()
        job.wait_until_it_hangs()
        yield job
    finally:
        job.end()

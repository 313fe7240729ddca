"""What a job uses while it runs: its rank, directory, parameters and process group.

Runs in the reader's training interpreter: standard library and Python 3.9, and torch once a job uses it.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, Mapping  # works on Python 3.9


class Context:
    """What a job uses: its rank, directory, parameters and process group.

    The directory belongs to the arm, is the working directory and TMPDIR, and is deleted afterwards.
    """

    def __init__(self, rank: int, world_size: int, backend: str, directory: Path, params: Mapping[str, Any]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.dir = directory
        self.params = params
        self.facts: Dict[str, Any] = {}

    def path(self, name: str) -> str:
        return str(self.dir / name)

    @property
    def device(self) -> Any:
        """The `torch.device` of this rank: its GPU if the arm has any, else the CPU."""
        import torch

        if not os.environ.get("CUDA_VISIBLE_DEVICES"):
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    def init_process_group(self, timeout_s: float, **options: Any) -> Any:
        """Join the default process group through a FileStore and return `torch.distributed`.

        `timeout_s` is torch's collective timeout. A FileStore is used because TCPStore stalled in some starts for
        reasons unrelated to the incident; only probes about the store use TCPStore. MASTER_ADDR and MASTER_PORT are
        set, because accelerate, DeepSpeed and Lightning ask for them before they check whether the group exists.
        """
        import torch.distributed as dist

        store = dist.FileStore(self.path("store"), self.world_size)
        store.set_timeout(timedelta(seconds=20))
        if self.backend == "nccl":
            options.setdefault("device_id", self.device)
        dist.init_process_group(
            self.backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            **options,
        )
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "1")
        return dist

    def reached(self) -> None:
        """Set the mechanism mark: every rank has completed its set-up, and the incident or its fix follows.

        Waits for all ranks, so that no slow start is mistaken for the symptom. An arm that fails before this mark is a
        failure of the harness, never evidence.
        """
        if not self.meet("reached"):
            raise TimeoutError("not every rank reached the mechanism mark within 20 s")
        Path(self.path("reached-%d" % self.rank)).touch()

    def meet(self, name: str, timeout_s: float = 20.0) -> bool:
        """A barrier through files, which needs no process group. False if a rank did not arrive in time."""
        Path(self.path("meet-%s-%d" % (name, self.rank))).touch()
        end = time.monotonic() + timeout_s
        while not all(os.path.exists(self.path("meet-%s-%d" % (name, r))) for r in range(self.world_size)):
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def note(self, **facts: Any) -> None:
        """Add measured values to the report, even if this rank is killed afterwards."""
        self.facts.update(facts)
        path = Path(self.path("rank%d.facts.json" % self.rank))
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.facts, default=str))
        part.rename(path)

"""A snapshot of the machine and of the reader's training interpreter, for `kb env` and for every report.

It is taken on machines where something is broken, so nothing is assumed to work: a value that cannot be read is None,
and `reasons` says why, under the value's dotted path. If there is both a reason and a value, the value is incomplete.
Torch, the driver and the packages are queried only in child processes with a deadline.
The snapshot identifies no person and no host: the host name is hashed, addresses are counted, secrets removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kb.machine import cgroup, driver, gpus, host, interpreter, network, settings
from kb.machine.gpus import Gpu
from kb.runtime.survey_fields import Reader


@dataclass(frozen=True, slots=True)
class MachineSnapshot:
    """The snapshot. `interpreter` is the surveyed interpreter; `python` is None if it did not answer."""

    interpreter: Path
    host: Mapping[str, Any] = field(default_factory=dict)
    cgroup: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    driver: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    nccl_files: Mapping[str, Any] = field(default_factory=dict)
    python: Mapping[str, Any] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable_memory_mib(self) -> int | None:
        """What a new process can allocate: the free memory of the machine, or of the cgroup if that is less."""
        free = self.host.get("memory_available_mib")
        limit, used = self.cgroup.get("memory_limit_mib"), self.cgroup.get("memory_used_mib")
        if isinstance(free, int) and isinstance(limit, int) and isinstance(used, int):
            return min(free, max(0, limit - used))
        return free if isinstance(free, int) else None

    def to_json(self) -> dict[str, Any]:
        gpus = None if self.gpus is None else [asdict(gpu) for gpu in self.gpus]
        return {**asdict(self), "interpreter": str(self.interpreter), "gpus": gpus}


def capture(python: Path, *, import_torch: bool = False) -> MachineSnapshot:
    """Take the snapshot. Never raises on a broken machine or waits longer than its child processes' deadlines."""
    reader = Reader()
    with interpreter.survey(python, import_torch) as survey:
        gpu_list, silence = gpus.list_gpus(reader)
        return MachineSnapshot(
            interpreter=python,
            host=reader.values("host", host.SOURCES),
            cgroup=reader.values("cgroup", cgroup.SOURCES),
            limits=reader.values("limits", host.LIMITS),
            network=reader.values("network", network.sources(reader)),
            driver=reader.values("driver", driver.sources(silence)),
            gpus=gpu_list,
            variables=settings.variables(),
            nccl_files=reader.values("nccl_files", settings.nccl_files()),
            python=reader.value("python", lambda: interpreter.read_survey(reader, python, survey, import_torch)),
            reasons=reader.reasons,
        )

"""What a probe file fills in, and what its jobs can ask for while they run.

A probe file holds `probe = Probe(...)`; at module level it imports the standard library and this module
only, torch inside the jobs. This module runs in the reader's training interpreter: it stands on the
standard library alone and on Python 3.9.

    Probe ── check            is this machine, environment or config exposed? read-only, below a second
          ── params           what `--set key=value` may change
          ── experiments      strongest first; the first whose needs are met runs
                Experiment ── control      the job as the incident has it: must fail as declared
                           ── treatment    the same job with exactly one change, the entry's fix
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple  # Python 3.9 reads these

FIDELITIES = ("hardware", "cpu", "stand-in", "model")
STATES = ("exposed", "clear", "unknown")


class Symptom(Exception):
    """The symptom that the entry describes was measured; the message gives the numbers."""


class Unavailable(Exception):
    """This machine lacks a capability that only shows once the job runs; the message names it."""


@dataclass(frozen=True)
class Expect:
    """How an arm must end. `pattern` is searched in the text of the failing ranks, or, for `hung`, in their stacks."""

    kind: str
    pattern: str = ""


def completed() -> Expect:
    """Every rank returns, so every assertion in the job held."""
    return Expect("completed")


def raised(pattern: str) -> Expect:
    """A rank raises, or aborts, with this text."""
    return Expect("raised", pattern)


def hung(pattern: str) -> Expect:
    """A rank is still there at the deadline, and its stack shows this."""
    return Expect("hung", pattern)


def killed(signal_name: str) -> Expect:
    """A rank dies of this signal (for instance `SIGKILL`) without a word of its own."""
    return Expect("killed", signal_name)


def symptom(pattern: str) -> Expect:
    """The job measures what the entry describes and raises `Symptom` with this text."""
    return Expect("symptom", pattern)


@dataclass(frozen=True)
class Arm:
    """One run of the job.

    `fidelity` is `hardware` (nccl, the GPUs), `cpu` (the real mechanism on CPU/gloo), `stand-in` (another
    component shows the mechanism; `stands_for` names what it replaces) or `model` (arithmetic). `because`
    says in one clause what this arm does and so why it ends as expected. `env` is added to the scrubbed
    environment.
    """

    job: Callable[[Context], None]
    expect: Expect
    because: str
    fidelity: str
    stands_for: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Needs:
    """What must be there before any arm starts; unmet, the verdict is `not-applicable` with that reason.

    `gpu_memory_mib` is free memory per GPU and also the cap that the arm gets. `packages` maps a
    distribution to a PEP 440 specifier ("" for any version); `programs` are found on PATH.
    """

    gpus: int = 0
    gpu_memory_mib: int = 1024
    memory_mib: int = 1024
    packages: Mapping[str, str] = field(default_factory=lambda: {"torch": ">=2.1"})
    programs: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """Two arms over one job.

    `deadline_s` bounds one arm; `settle_s` is how long the other ranks may still report after the first
    one failed; `expected_s` is what control and treatment took where it was written. With `linger` a rank
    that is done waits for the others, because its early exit would break a peer that is still starting.
    `stochastic` experiments fail only sometimes: they are run repeatedly and judged by counts.
    """

    name: str
    control: Arm
    treatment: Arm
    world_size: int = 2
    backend: str = "gloo"
    needs: Needs = field(default_factory=Needs)
    deadline_s: float = 20.0
    settle_s: float = 1.0
    expected_s: Tuple[float, float] = (1.0, 1.0)
    linger: bool = True
    stochastic: bool = False


@dataclass(frozen=True)
class Param:
    """One value that `--set` may change. `type` is int, float, str or path; `default` None means not given."""

    type: str
    help: str
    default: Any = None


@dataclass(frozen=True)
class Finding:
    """What a check saw: `exposed`, `clear` or `unknown`, the evidence line by line, and what to do about it."""

    state: str
    evidence: List[str]
    advice: str = ""


def exposed(*evidence: str, advice: str = "") -> Finding:
    return Finding("exposed", list(evidence), advice)


def clear(*evidence: str) -> Finding:
    return Finding("clear", list(evidence))


def unknown(*evidence: str, advice: str = "") -> Finding:
    return Finding("unknown", list(evidence), advice)


Check = Callable[[Mapping[str, Any]], Finding]


@dataclass(frozen=True)
class Probe:
    """The executable half of an entry: at least a check or one experiment."""

    experiments: Tuple[Experiment, ...] = ()
    check: Optional[Check] = None
    params: Mapping[str, Param] = field(default_factory=dict)

    def contract_faults(self) -> List[str]:
        """What breaks the contract, one sentence each; empty when the probe is sound."""
        faults = []
        if not self.experiments and self.check is None:
            faults.append("has neither a check nor an experiment")
        names = [experiment.name for experiment in self.experiments]
        if len(set(names)) < len(names):
            faults.append("has two experiments of one name")
        for experiment in self.experiments:
            faults += ["%s: %s" % (experiment.name, fault) for fault in _experiment_faults(experiment)]
        for name, param in self.params.items():
            if param.type not in ("int", "float", "str", "path"):
                faults.append("param %s has the unknown type %r" % (name, param.type))
        return faults

    def describe(self) -> Dict[str, Any]:
        """The declaration as plain data, without the functions."""
        return {
            "check": self.check is not None,
            "params": {name: asdict(param) for name, param in self.params.items()},
            "experiments": [_describe_experiment(experiment) for experiment in self.experiments],
        }

    @staticmethod
    def from_description(data: Mapping[str, Any]) -> Probe:
        """The declaration again from `describe()`; its functions stayed in the other process."""
        return Probe(
            experiments=tuple(_read_experiment(one) for one in data["experiments"]),
            check=_stays_elsewhere if data["check"] else None,
            params={name: Param(**param) for name, param in data["params"].items()},
        )


def _read_experiment(data: Mapping[str, Any]) -> Experiment:
    def arm(one: Mapping[str, Any]) -> Arm:
        return Arm(**{**one, "expect": Expect(**one["expect"]), "job": _stays_elsewhere})

    needs = Needs(**{**data["needs"], "programs": tuple(data["needs"]["programs"])})
    arms = {"control": arm(data["control"]), "treatment": arm(data["treatment"])}
    return Experiment(**{**data, **arms, "needs": needs, "expected_s": tuple(data["expected_s"])})


def _stays_elsewhere(_: Any) -> Any:
    raise AssertionError("a probe's functions run in worker processes only")


def _experiment_faults(experiment: Experiment) -> List[str]:
    faults = []
    for name, arm in (("control", experiment.control), ("treatment", experiment.treatment)):
        if arm.fidelity not in FIDELITIES:
            faults.append("%s has the unknown fidelity %r" % (name, arm.fidelity))
        if (arm.fidelity in ("stand-in", "model")) != bool(arm.stands_for):
            faults.append("%s must say `stands_for` exactly when it is a stand-in or a model" % name)
        try:
            re.compile(arm.expect.pattern)
        except re.error as error:
            faults.append("%s expects a pattern that does not compile: %s" % (name, error))
    if experiment.control.expect.kind == "completed":
        faults.append("control must fail: it expects `completed`")
    elif experiment.control.expect.kind != "killed" and re.search(experiment.control.expect.pattern, ""):
        faults.append("control expects a pattern that matches nothing at all")
    if experiment.treatment.expect.kind != "completed":
        faults.append("treatment must expect `completed`")
    if experiment.backend == "gloo" and "hardware" in (experiment.control.fidelity, experiment.treatment.fidelity):
        faults.append("a gloo run is never of hardware fidelity")
    return faults


def _describe_experiment(experiment: Experiment) -> Dict[str, Any]:
    shallow = {
        name: getattr(experiment, name)
        for name in ("name", "world_size", "backend", "deadline_s", "settle_s", "linger", "stochastic")
    }
    arms = {name: _describe_arm(getattr(experiment, name)) for name in ("control", "treatment")}
    needs = experiment.needs
    return {
        **shallow,
        **arms,
        "expected_s": list(experiment.expected_s),
        "needs": {
            "gpus": needs.gpus,
            "gpu_memory_mib": needs.gpu_memory_mib,
            "memory_mib": needs.memory_mib,
            "packages": dict(needs.packages),
            "programs": list(needs.programs),
        },
    }


def _describe_arm(arm: Arm) -> Dict[str, Any]:
    return {
        "expect": {"kind": arm.expect.kind, "pattern": arm.expect.pattern},
        "because": arm.because,
        "fidelity": arm.fidelity,
        "stands_for": arm.stands_for,
        "env": dict(arm.env),
    }


class Context:
    """What a job knows and may use: its rank, its directory, its parameters, and a process group.

    The directory is the arm's own, is the working directory and TMPDIR, and is deleted afterwards.
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
        """`torch.device` of this rank: its GPU when the arm was given any, else the CPU."""
        import torch

        if not os.environ.get("CUDA_VISIBLE_DEVICES"):
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    def init_process_group(self, timeout_s: float, **options: Any) -> Any:
        """Join the default process group through a FileStore and return `torch.distributed`.

        `timeout_s` is torch's collective timeout. A FileStore, because TCPStore stalled in some starts
        for reasons that have nothing to do with the incident; only probes about the store use that one.
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
        return dist

    def reached(self) -> None:
        """The mechanism mark: set-up is done on every rank, and what follows is the incident or its fix.

        Waits for all ranks, so that no slow start passes for the symptom. An arm that fails before this
        mark is a failure of the harness, never evidence.
        """
        if not self.meet("reached"):
            raise TimeoutError("not every rank reached the mechanism mark within 20 s")
        Path(self.path("reached-%d" % self.rank)).touch()

    def meet(self, name: str, timeout_s: float = 20.0) -> bool:
        """Barrier through files: works when the process group is broken. False when a rank did not come in time."""
        Path(self.path("meet-%s-%d" % (name, self.rank))).touch()
        end = time.monotonic() + timeout_s
        while not all(os.path.exists(self.path("meet-%s-%d" % (name, r))) for r in range(self.world_size)):
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def note(self, **facts: Any) -> None:
        """Put measured values into the report, also when this rank is killed afterwards."""
        self.facts.update(facts)
        path = Path(self.path("rank%d.facts.json" % self.rank))
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.facts, default=str))
        part.rename(path)

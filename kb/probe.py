"""The declaration in a probe file, and what its jobs may raise and use.

A probe file defines `probe = Probe(...)`. At module level it imports only the standard library and this module; its
jobs import torch. This module runs in the reader's training interpreter: standard library and Python 3.9 only.

    Probe ── check            is this machine, environment or config exposed? read-only, takes less than a second
          ── params           what `--set key=value` may change
          ── experiments      strongest first; only the first that can run here runs
          ── variants         the incident in other forms and in libraries; each runs too, if it can
                Experiment ── control      the job as the incident has it: must fail as declared
                           ── treatment    the same job with exactly one change, the entry's fix
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, List, Mapping, Optional, Tuple  # works on Python 3.9

from kb.context import Context as Context  # so that a probe file needs only this module

FIDELITIES = ("hardware", "cpu", "stand-in", "model")
ARMS = ("control", "treatment")
STATES = ("exposed", "clear", "unknown")
# What gloo raises if a call waits too long. If several calls are under way, the first to time out closes the
# connections, and the others then say so: gloo/transport/tcp/unbound_buffer.cc, UnboundBuffer::waitRecv.
GLOO_TIMEOUT = r"(Timed out waiting \d+ms for (recv|send) operation|Application timeout caused pair closure)"
# What nccl2 (called nccl from torch 2.15 on) says about a timeout; it names no operation. The watchdog's last words are
# in nccl2/ProcessGroupNCCL.cpp, abortProcess; the exception is in nccl2/WorkNCCL.cpp, setTerminalStatus.
NCCL2_TIMEOUT = r"(Aborting process on rank \d+ due to timeout\b|NCCL operation timed out)"


class Symptom(Exception):
    """The symptom that the entry describes was measured; the message gives the numbers."""


class Unavailable(Exception):
    """This machine lacks a capability, which is known only when the job runs; the message names it."""


@dataclass(frozen=True)
class Expect:
    """How an arm must end: how the rank that failed first must fail.

    `pattern` is searched for in what ended that rank, not in all its output: in its exception, the last words of an
    abort, or, for `hung`, its stacks. If the failure follows from the failure of another rank, `after` is searched for
    in what ended the first rank, and `pattern` in what ended any other. What ended a rank is a text, or `SIGKILL`, or
    `exit code 1`.
    """

    kind: str
    pattern: str = ""
    after: str = ""


def completed() -> Expect:
    """Every rank returns, so every assertion in the job held."""
    return Expect("completed")


def raised(pattern: str, *, after: str = "") -> Expect:
    """A rank raises, or aborts, with this text: the first rank that fails, or one that fails `after` it."""
    return Expect("raised", pattern, after)


def hung(pattern: str, *, after: str = "") -> Expect:
    """A rank is still running at the deadline, and its stack shows this; with `after`, another rank failed before."""
    return Expect("hung", pattern, after)


def killed(signal_name: str) -> Expect:
    """A rank dies of this signal (for instance `SIGKILL`) without any output about it."""
    return Expect("killed", signal_name)


def symptom(pattern: str) -> Expect:
    """The job measures what the entry describes and raises `Symptom` with this text."""
    return Expect("symptom", pattern)


@dataclass(frozen=True)
class Arm:
    """One run of the job.

    `fidelity` is `hardware` (nccl, the GPUs), `cpu` (the real mechanism on CPU/gloo), `stand-in` (another component
    shows the mechanism; `stands_for` names what it replaces) or `model` (arithmetic). `because` says in one clause what
    this arm does and why it therefore ends as expected. `env` is added to the scrubbed environment.
    """

    job: Callable[[Context], None]
    expect: Expect
    because: str
    fidelity: str
    stands_for: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Needs:
    """What any arm needs; if something is missing, the verdict is `not-applicable`, with that reason.

    `gpu_memory_mib` is free memory per GPU and also the cap that the arm gets. `packages` maps a distribution to a PEP
    440 specifier ("" for any version); `programs` are found on PATH.
    """

    gpus: int = 0
    gpu_memory_mib: int = 1024
    memory_mib: int = 1024
    packages: Mapping[str, str] = field(default_factory=lambda: {"torch": ">=2.1"})
    programs: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """Two arms of one job.

    `deadline_s` limits one arm. `settle_s` is how long the other ranks may still report after the first failure.
    `expected_s` is what control and treatment took on the author's machine. With `linger`, a rank that has completed
    waits for the others, because its early exit would break a rank that is still starting. `stochastic` experiments
    fail only sometimes: they run repeatedly and are judged by counts.
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

    def on_gpus(
        self,
        gpus: int = 2,
        *,
        expect: Optional[Expect] = None,
        expected_s: Tuple[float, float] = (20.0, 10.0),
        gpu_memory_mib: int = 1024,
        **changes: Any,
    ) -> Experiment:
        """The same two arms on nccl and the GPUs, as the experiment called `nccl`.

        `expect` is how the control arm ends there, if it differs. `changes` are applied to the experiment.
        """
        arms = {name: replace(getattr(self, name), fidelity="hardware", stands_for="") for name in ARMS}
        if expect is not None:
            arms["control"] = replace(arms["control"], expect=expect)
        needs = replace(self.needs, gpus=gpus, gpu_memory_mib=gpu_memory_mib)
        common = {"name": "nccl", "backend": "nccl", "deadline_s": 60.0, "settle_s": 3.0, "expected_s": expected_s}
        return replace(self, **{**common, "needs": needs, **arms, **changes})


@dataclass(frozen=True)
class Param:
    """One value that `--set` may change. `type` is int, float, str or path; `default` None means not given."""

    type: str
    help: str
    default: Any = None


@dataclass(frozen=True)
class Finding:
    """The result of a check: `exposed`, `clear` or `unknown`, the evidence line by line, and what to do about it."""

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
    """The executable half of an entry: at least a check or one experiment.

    A variant shows the incident in another form, or inside a library that `needs.packages` names. It runs in addition
    to the experiment wherever its needs are met, and has its own verdict.
    """

    experiments: Tuple[Experiment, ...] = ()
    variants: Tuple[Experiment, ...] = ()
    check: Optional[Check] = None
    params: Mapping[str, Param] = field(default_factory=dict)

    @property
    def every(self) -> Tuple[Experiment, ...]:
        """Experiments, then variants; a number identifies any of them in this order."""
        return self.experiments + self.variants

"""What verifying an entry would run: which experiments, with which parameters, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kb.content.entry import Entry
from kb.errors import BadParameter, LaunchError, ProbeError
from kb.harness.launcher import Launcher, Task
from kb.machine.snapshot import MachineSnapshot
from kb.patterns.redos import backtracking_risk
from kb.probe import ARMS, Experiment, Param, Probe
from kb.runtime.declaration import from_description
from kb.verify.checks import failure_reason
from kb.verify.requirements import free_gpus, unmet

DESCRIBE_S = 10.0


def _existing_path(text: str) -> Path:
    """An absolute path, since workers have another working directory. Raises `ValueError` if nothing is there."""
    path = Path(text).expanduser().absolute()
    if not path.exists():
        raise ValueError
    return path


CONVERT: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "path": _existing_path,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One entry's verification, decided before any arm starts. `fault` says why nothing can run at all.

    `runnable` are the experiments whose needs are met, strongest first; the first one that this machine can run counts.
    `variants` are the variants whose needs are met; all of them run. `has_named_file`: the caller passed a file of
    their own.
    """

    entry: Entry
    probe_file: Path | None
    probe: Probe = field(default_factory=Probe)
    runnable: tuple[Experiment, ...] = ()
    variants: tuple[Experiment, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    params: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    has_settings: bool = False
    has_named_file: bool = False
    fault: str = ""
    waiver: str = ""

    @property
    def experiments(self) -> tuple[Experiment, ...]:
        """What will run, as far as is known beforehand; only variants if no experiment can run."""
        return (*self.runnable[:1], *self.variants)

    @property
    def expected_s(self) -> float:
        """The seconds that the arms take one after the other, as their author measured."""
        return sum(sum(experiment.expected_s) for experiment in self.experiments)

    @property
    def has_torch(self) -> bool:
        """Whether any rank is forked from a process that has imported torch."""
        return any(_is_preloaded(experiment) for experiment in self.experiments)

    def task(self, experiment: Experiment, arm_name: str) -> Task:
        """The launcher's task for one arm of an experiment."""
        assert self.probe_file is not None
        on_gpus = experiment.needs.gpus > 0
        return Task(
            action="run",
            probe=self.probe_file,
            deadline_s=experiment.deadline_s,
            world_size=experiment.world_size,
            backend=experiment.backend,
            experiment=self.probe.every.index(experiment),
            arm=arm_name,
            params=self.params,
            env=getattr(experiment, arm_name).env,
            settle_s=experiment.settle_s,
            linger=experiment.linger,
            execute=on_gpus,
            has_torch=_is_preloaded(experiment),
            gpus=self.gpus[: experiment.needs.gpus],
            gpu_memory_mib=experiment.needs.gpu_memory_mib if on_gpus else 0,
        )

    def what_runs(self, experiment: Experiment, arm_name: str) -> tuple[object, Task]:
        """A value that is equal for arms that run the same and differ only in words or in what is expected of them."""
        return getattr(experiment, arm_name).job, replace(self.task(experiment, arm_name), experiment=0, arm="")

    def first_like(self, experiment: Experiment, arm_name: str) -> tuple[Experiment, str]:
        """The first arm of the plan that runs the same. The logs that these arms share have its name."""
        wanted = self.what_runs(experiment, arm_name)
        arms = ((other, name) for other in self.experiments if not other.stochastic for name in ARMS)
        return next((arm for arm in arms if self.what_runs(*arm) == wanted), (experiment, arm_name))

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.entry.id,
            "probe": str(self.probe_file) if self.probe_file else None,
            "check": self.probe.check is not None,
            "experiments": [_experiment_json(experiment) for experiment in self.experiments],
            "gpus": list(self.gpus),
            "skipped": [{"experiment": name, "reason": reason} for name, reason in self.skipped],
            "params": {name: str(value) for name, (_, value) in self.params.items() if value is not None},
            "fault": self.fault or self.waiver or None,
        }


def make_plan(
    entry: Entry,
    probe_file: Path | None,
    launcher: Launcher,
    machine: MachineSnapshot,
    settings: Mapping[str, str],
    *,
    force: bool = False,
) -> Plan:
    """Read the probe's declaration in a child process, and decide which needs are met here."""
    if probe_file is None:
        return Plan(entry, None, waiver=entry.meta.probe_waiver or "the entry has no probe")
    try:
        probe = describe(probe_file, launcher)
    except ProbeError as error:
        return Plan(entry, probe_file, fault=error.message)
    except LaunchError as error:
        if launcher.is_closed:  # too late for anything to run
            return Plan(entry, probe_file, fault=error.message)
        raise
    params = typed_params(probe.params, settings)
    reasons = {experiment.name: unmet(experiment.needs, machine, force=force) for experiment in probe.every}
    runnable = tuple(experiment for experiment in probe.experiments if not reasons[experiment.name])
    variants = tuple(variant for variant in probe.variants if not reasons[variant.name])
    skipped = tuple((name, reason) for name, reason in reasons.items() if reason)
    most_mib = max((experiment.needs.gpu_memory_mib for experiment in (*runnable, *variants)), default=0)
    gpus = free_gpus(machine, force=force, memory_mib=most_mib)
    given = [probe.params[name].type for name in settings if name in probe.params]
    return Plan(
        entry, probe_file, probe, runnable, variants, skipped, params, gpus, bool(given), has_named_file="path" in given
    )


def _is_preloaded(experiment: Experiment) -> bool:
    """Whether the ranks are forked from a process that has imported torch."""
    return "torch" in experiment.needs.packages and not experiment.needs.gpus


def _experiment_json(experiment: Experiment) -> dict[str, Any]:
    needs = experiment.needs
    return {
        "name": experiment.name,
        "world_size": experiment.world_size,
        "backend": experiment.backend,
        "deadline_s": experiment.deadline_s,
        "expected_s": list(experiment.expected_s),
        "needs": {"gpus": needs.gpus, "memory_mib": needs.memory_mib, "packages": dict(needs.packages)},
        "arms": {
            name: {
                "because": arm.because,
                "expected": arm.expect.kind,
                "fidelity": arm.fidelity,
                "env": dict(arm.env),
            }
            for name, arm in (("control", experiment.control), ("treatment", experiment.treatment))
        },
    }


def describe(probe_file: Path, launcher: Launcher) -> Probe:
    """The declaration in a probe file. Raises `ProbeError` if the file breaks the contract."""
    if not probe_file.is_file():
        raise ProbeError(f"the probe file {probe_file} does not exist", "`kb lint` lists such entries")
    result, outcome = launcher.rank_results(Task("describe", probe_file, DESCRIBE_S))
    if result is None or result.get("outcome") != "completed":
        raise ProbeError(f"the probe file {probe_file.name} cannot be loaded: {failure_reason(result, outcome)}")
    try:
        probe, faults = from_description(result["probe"]), result["faults"]
    except (KeyError, TypeError) as error:  # the file wrote its own result
        raise ProbeError(f"the probe file {probe_file.name} cannot be loaded: its result is not ours") from error
    faults = [*faults, *_slow_patterns(probe)]
    if faults:
        raise ProbeError(f"the probe file {probe_file.name} breaks the contract: {'; '.join(faults)}")
    return probe


def _slow_patterns(probe: Probe) -> list[str]:
    """Patterns that could make judging hang, since this process searches the output of the ranks for them."""
    expected = {arm.expect.pattern for experiment in probe.every for arm in (experiment.control, experiment.treatment)}
    return [f"{risk} ({pattern})" for pattern in sorted(expected) if (risk := backtracking_risk(pattern))]


def typed_params(params: Mapping[str, Param], settings: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """The declared parameters with `--set` applied. Raises `BadParameter` for a value of the wrong type."""
    values = {name: (param.type, param.default) for name, param in params.items()}
    for name, text in settings.items():
        if name not in params:
            continue
        try:
            values[name] = (params[name].type, CONVERT[params[name].type](text))
        except ValueError:
            message = f"--set {name}={text}: not {_type_phrase(params[name].type)}"
            raise BadParameter(message, params[name].help) from None
    return values


def reject_unknown(settings: Mapping[str, str], plans: list[Plan]) -> list[Plan]:
    """Return the plans. Raises `BadParameter` for a setting that none of the chosen probes takes."""
    known = {name: param.help for plan in plans for name, param in plan.probe.params.items()}
    for name in settings:
        if name not in known and not all(plan.fault for plan in plans):
            takes = "; ".join(f"{name}: {text}" for name, text in sorted(known.items()))
            raise BadParameter(
                f"no chosen probe takes {name!r}", f"they take {takes}" if takes else "they take no parameters"
            )
    return plans


def _type_phrase(kind: str) -> str:
    return {"int": "a whole number", "float": "a number", "path": "the path of a file or folder that is there"}[kind]

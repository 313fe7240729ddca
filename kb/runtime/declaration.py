"""A probe's declaration as plain data, and what breaks its contract.

Runs in the reader's training interpreter (`describe`, `contract_faults`) and in kb (`from_description`): standard
library and Python 3.9 only.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Dict, List, Mapping, Tuple  # works on Python 3.9

from kb.probe import FIDELITIES, Arm, Expect, Experiment, Needs, Param, Probe


def contract_faults(probe: Probe) -> List[str]:
    """What breaks the contract, one sentence each; empty if the probe is sound."""
    faults = []
    if not probe.experiments and probe.check is None:
        faults.append("has neither a check nor an experiment")
    names = [experiment.name for experiment in probe.every]
    if len(set(names)) < len(names):
        faults.append("has two experiments of the same name")
    for experiment in probe.every:
        faults += ["%s: %s" % (experiment.name, fault) for fault in _experiment_faults(experiment)]
    for name, param in probe.params.items():
        if param.type not in ("int", "float", "str", "path"):
            faults.append("param %s has the unknown type %r" % (name, param.type))
    return faults


@dataclass(frozen=True)
class Elsewhere:
    """A placeholder for a function that stays in the other process.

    Jobs of one probe have the same number if they call the same function with the same arguments.
    """

    number: int

    def __call__(self, _: Any) -> Any:
        raise AssertionError("a probe's functions run in worker processes only")


def describe(probe: Probe) -> Dict[str, Any]:
    """The declaration as plain data, without its functions."""
    calls: List[Any] = []
    return {
        "check": probe.check is not None,
        "params": {name: asdict(param) for name, param in probe.params.items()},
        "experiments": [_describe_experiment(experiment, calls) for experiment in probe.experiments],
        "variants": [_describe_experiment(experiment, calls) for experiment in probe.variants],
    }


def from_description(data: Mapping[str, Any]) -> Probe:
    """Rebuild the declaration from `describe()`, without its functions, which stay in the other process."""
    return Probe(
        experiments=tuple(_read_experiment(experiment) for experiment in data["experiments"]),
        variants=tuple(_read_experiment(experiment) for experiment in data["variants"]),
        check=Elsewhere(-1) if data["check"] else None,
        params={name: Param(**param) for name, param in data["params"].items()},
    )


def _read_experiment(data: Mapping[str, Any]) -> Experiment:
    def arm(declaration: Mapping[str, Any]) -> Arm:
        return Arm(**{**declaration, "expect": Expect(**declaration["expect"]), "job": Elsewhere(declaration["job"])})

    needs = Needs(**{**data["needs"], "programs": tuple(data["needs"]["programs"])})
    arms = {"control": arm(data["control"]), "treatment": arm(data["treatment"])}
    return Experiment(**{**data, **arms, "needs": needs, "expected_s": tuple(data["expected_s"])})


def _experiment_faults(experiment: Experiment) -> List[str]:
    faults = []
    if _function(experiment.control) is not _function(experiment.treatment):
        faults.append(
            "the arms run two functions: only one job, called in two ways, shows that nothing but the fix changed"
        )
    for name, arm in (("control", experiment.control), ("treatment", experiment.treatment)):
        if arm.fidelity not in FIDELITIES:
            faults.append("%s has the unknown fidelity %r" % (name, arm.fidelity))
        if (arm.fidelity in ("stand-in", "model")) != bool(arm.stands_for):
            faults.append("%s must say `stands_for` exactly when it is a stand-in or a model" % name)
        try:
            re.compile(arm.expect.pattern)
            re.compile(arm.expect.after)
        except re.error as error:
            faults.append("%s expects a pattern that does not compile: %s" % (name, error))
        if arm.fidelity == "hardware" and not experiment.needs.gpus:
            faults.append("%s is of hardware fidelity, but the experiment needs no GPU (`Needs(gpus=N)`)" % name)
    if experiment.control.expect.kind == "completed":
        faults.append("control must fail: it expects `completed`")
    elif experiment.control.expect.kind != "killed" and re.search(experiment.control.expect.pattern, ""):
        faults.append("control expects a pattern that matches the empty string")
    if experiment.treatment.expect.kind != "completed":
        faults.append("treatment must expect `completed`")
    if experiment.backend == "gloo" and "hardware" in (experiment.control.fidelity, experiment.treatment.fidelity):
        faults.append("a gloo run is never of hardware fidelity")
    return faults


def _function(arm: Arm) -> Any:
    return arm.job.func if isinstance(arm.job, partial) else arm.job


def _call(job: Any) -> Tuple[Any, Any]:
    """The function of a job, and its arguments apart from the context, defaults included."""
    function, args, keywords = (job.func, job.args, job.keywords) if isinstance(job, partial) else (job, (), {})
    try:
        bound = inspect.signature(function).bind(None, *args, **keywords)
    except (TypeError, ValueError):  # it will fail when it runs
        return function, (args, keywords)
    bound.apply_defaults()
    return function, bound.arguments


def _describe_experiment(experiment: Experiment, calls: List[Any]) -> Dict[str, Any]:
    shallow = {
        name: getattr(experiment, name)
        for name in ("name", "world_size", "backend", "deadline_s", "settle_s", "linger", "stochastic")
    }
    arms = {name: _describe_arm(getattr(experiment, name), calls) for name in ("control", "treatment")}
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


def _describe_arm(arm: Arm, calls: List[Any]) -> Dict[str, Any]:
    """Describe an arm. `calls` are the calls of earlier arms; its own is added."""
    calls.append(_call(arm.job))
    return {
        "job": calls.index(calls[-1]),
        "expect": asdict(arm.expect),
        "because": arm.because,
        "fidelity": arm.fidelity,
        "stands_for": arm.stands_for,
        "env": dict(arm.env),
    }

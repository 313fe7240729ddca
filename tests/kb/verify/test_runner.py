"""The order in which plans run, and which arms run once for several experiments, with real arms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.harness.launcher import Launcher
from kb.machine import snapshot
from kb.verify import runner
from kb.verify.plan import Plan, make_plan
from kb.verify.report import Report
from kb.verify.runner import RunOptions, verify
from kb.verify.verdict import Verdict

PROBE = """
import time
from functools import partial
from kb.probe import Arm, Experiment, Probe, Symptom, completed, symptom


def job(ctx, *, fails):
    ctx.reached()
    time.sleep({seconds})
    if fails:
        raise Symptom("a symptom of its own")


probe = Probe(
    experiments=(
        Experiment(
            name="pause",
            control=Arm(partial(job, fails=True), symptom("a symptom of its own"), "it fails", "cpu"),
            treatment=Arm(partial(job, fails=False), completed(), "it does not", "cpu"),
            world_size=1,
            deadline_s=60,
            expected_s=({expected}, {expected}),
        ),
    )
)
"""


SHARED = """
import os
from functools import partial
from kb.probe import Arm, Experiment, Param, Probe, Symptom, completed, symptom


def job(ctx, *, cause, harmless=False):
    ctx.reached()
    with open(ctx.params["ran"], "a") as file:
        file.write("%s %s %s\\n" % (cause, harmless, os.environ.get("KB_WHERE", "")))
    if cause:
        raise Symptom("a symptom of its own")


def pair(name, fixed, *, cause="bug", env={}, stochastic=False):
    return Experiment(
        name=name,
        control=Arm(partial(job, cause=cause), symptom("a symptom"), "it fails", "cpu", env=env),
        treatment=Arm(partial(job, **fixed), completed(), "it does not", "cpu", env=env),
        world_size=1,
        deadline_s=60,
        stochastic=stochastic,
    )


probe = Probe(
    experiments=(pair("first", {"cause": ""}),),
    variants=(
        pair("same-control", {"cause": "", "harmless": True}),
        pair("all-the-same", {"cause": "", "harmless": False}),
        pair("other-cause", {"cause": "", "harmless": True}, cause="other"),
        pair("other-environment", {"cause": ""}, env={"KB_WHERE": "elsewhere"}),
    ),
    params={"ran": Param("str", "", "the file that arms write to")},
)
"""


class Begun(dict[str, str]):
    """A progress that knows what has begun."""

    def begin(self, key: str, text: str) -> None:
        self[key] = text

    def end(self, key: str) -> None: ...


@pytest.mark.slow
def test_of_the_plans_that_wait_the_shortest_and_the_longest_begin_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job at a time: the first plan begins as soon as it is read, and the others are read while it runs."""
    monkeypatch.setattr(runner, "JOBS", 1)
    catalog = load_catalog((builtin_root(),))
    machine = snapshot.capture(Path(sys.executable))
    plans: list[Plan] = []
    seen: list[str] = []

    def note(report: Report) -> None:
        seen.append(report.entry_id)

    with Launcher(Path(sys.executable)) as launcher:
        for entry, expected in zip(catalog.entries.values(), (1.0, 2.0, 9.0, 5.0), strict=False):
            probe_file = tmp_path / f"probe_{len(plans)}.py"
            probe_file.write_text(PROBE.format(seconds=0.0 if plans else 2.0, expected=expected))
            plans.append(make_plan(entry, probe_file, launcher, machine, {}))
        result = verify(plans, launcher, {}, RunOptions(on_report=note), Begun())
    ids = [plan.entry.id for plan in plans]
    assert {report.verdict for report in result.reports} == {Verdict.VERIFIED}
    assert seen == [ids[0], ids[1], ids[2], ids[3]]
    assert [report.entry_id for report in result.reports] == ids


@pytest.mark.slow
def test_an_arm_that_experiments_share_runs_once(tmp_path: Path) -> None:
    """The same function with the same arguments, defaults included, in the same environment: as the first that has it."""
    entry = next(iter(load_catalog((builtin_root(),))))
    probe_file, ran = tmp_path / "probe.py", tmp_path / "ran"
    probe_file.write_text(SHARED)
    with Launcher(Path(sys.executable)) as launcher:
        machine = snapshot.capture(Path(sys.executable))
        plan = make_plan(entry, probe_file, launcher, machine, {"ran": str(ran)})
        once = verify([plan], launcher, {}, RunOptions(), begun := Begun()).reports[0]
        lines = ran.read_text().splitlines()
        ran.write_text("")
        twice = verify([plan], launcher, {}, RunOptions(repeat=2), Begun()).reports[0]
    assert once.verdict is twice.verdict is Verdict.VERIFIED, once.to_json()
    assert [result.experiment.name for result in once.results] == [experiment.name for experiment in plan.experiments]
    assert sorted(lines) == sorted(
        ["bug False ", " False ", " True ", "other False ", "bug False elsewhere", " False elsewhere"]
    )
    assert sorted(begun) == [
        f"{entry.id} {name}"
        for name in (
            "first control",
            "first treatment",
            "other-cause control",
            "other-environment control",
            "other-environment treatment",
            "same-control treatment",
        )
    ]
    assert len(ran.read_text().splitlines()) == len(lines) + 2 * len(plan.experiments)  # a second pair runs its own

"""Every probe, present and future: its verdict follows the arms, whichever way they are set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kb import catalog, environment, root
from kb.catalog import Catalog
from kb.entry import Role
from kb.environment import Environment
from kb.launcher import Launcher
from kb.plan import Plan, make_plan
from kb.verdict import Verdict, judge

CATALOG = catalog.load((root.built_in(),))
IDS = [entry.id for entry in CATALOG if entry.meta.probe]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(Path(sys.executable)) as started:
        started.preload()
        yield started


@pytest.fixture(scope="module")
def machine() -> Environment:
    return environment.capture(Path(sys.executable))


def plan_of(entry_id: str, launcher: Launcher, machine: Environment) -> Plan:
    entry = CATALOG.get(entry_id)
    return make_plan(entry, CATALOG.probe_file(entry), launcher, machine, {})


def test_there_are_probes_to_test() -> None:
    assert isinstance(CATALOG, Catalog)
    assert len(IDS) >= 14


@pytest.mark.parametrize("entry_id", IDS)
def test_the_verdict_follows_the_arms(entry_id: str, launcher: Launcher, machine: Environment) -> None:
    """Both arms control: fix-ineffective. Both treatment: not-reproduced. Swapped: inverted."""
    plan = plan_of(entry_id, launcher, machine)
    assert not plan.fault
    if plan.experiment is None:
        pytest.skip("; ".join(f"{name}: {reason}" for name, reason in plan.skipped) or "the probe is a check")
    patterns = [one.pattern for one in plan.entry.meta.signatures if one.role is not Role.CONTEXT]
    runs = {
        (arm, number): launcher.run(plan.task(arm, 120), f"{arm}{number}")
        for arm in ("control", "treatment")
        for number in (1, 2)
    }
    settings = {
        ("control", "treatment"): Verdict.VERIFIED,
        ("control", "control"): Verdict.FIX_INEFFECTIVE,
        ("treatment", "treatment"): Verdict.NOT_REPRODUCED,
        ("treatment", "control"): Verdict.INVERTED,
    }
    seen = {names: judge(plan.experiment, runs[names[0], 1], runs[names[1], 2], patterns).verdict for names in settings}
    assert seen == settings
    for run in runs.values():
        assert run.leftovers == ()

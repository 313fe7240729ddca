"""Every probe, present and future: its verdict follows the arms, whichever way they are set.

Of probes that did so before and have not changed, a sample: see `tests.support.proven`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kb.content.catalog import Catalog, load_catalog
from kb.content.entry import Role
from kb.content.roots import builtin_root
from kb.harness.launcher import Launcher
from kb.machine import snapshot
from kb.machine.snapshot import MachineSnapshot
from kb.probe import ARMS, Experiment
from kb.verify.plan import Plan, make_plan
from kb.verify.runner import JOBS
from kb.verify.verdict import Verdict, judge
from tests.support.proven import to_run

pytestmark = pytest.mark.slow

CATALOG = load_catalog((builtin_root(),))
IDS = to_run(CATALOG)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """It leaves nothing in the folder for temporary files; torch's compiler would, as soon as it is imported."""
    temporary = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TMPDIR", str(temporary))
        environment.setattr(tempfile, "tempdir", None)
        with Launcher(Path(sys.executable)) as started:
            started.preload()
            yield started
    assert list(temporary.iterdir()) == []


@pytest.fixture(scope="module")
def machine() -> MachineSnapshot:
    return snapshot.capture(Path(sys.executable))


def plan_of(entry_id: str, launcher: Launcher, machine: MachineSnapshot) -> Plan:
    entry = CATALOG.get(entry_id)
    return make_plan(entry, CATALOG.probe_file(entry), launcher, machine, {})


def test_there_are_probes_to_test() -> None:
    assert isinstance(CATALOG, Catalog)
    assert len(IDS) >= 5


@pytest.mark.parametrize("entry_id", IDS)
def test_the_verdict_follows_the_arms(entry_id: str, launcher: Launcher, machine: MachineSnapshot, home: Path) -> None:
    """Both arms control: fix-ineffective. Both treatment: not-reproduced. Swapped: inverted.

    What libraries leave in folders for temporary files, as the workers of a DataLoader do, goes with the arm.
    """
    plan = plan_of(entry_id, launcher, machine)
    assert not plan.fault
    refused = [f"{name}: {reason}" for name, reason in plan.skipped]
    for experiment in (*plan.runnable, *plan.variants):
        seen = swap(plan, experiment, launcher)
        if seen["control", "treatment"] is Verdict.NOT_APPLICABLE:
            refused.append(f"{experiment.name}: this machine refuses it")
        else:
            assert seen == FOLLOWING, experiment.name
    assert list((home / "tmp").iterdir()) == []
    if len(refused) == len(plan.probe.every):
        pytest.skip("; ".join(refused) or "the probe is a check")


FOLLOWING = {
    ("control", "treatment"): Verdict.VERIFIED,
    ("control", "control"): Verdict.FIX_INEFFECTIVE,
    ("treatment", "treatment"): Verdict.NOT_REPRODUCED,
    ("treatment", "control"): Verdict.INVERTED,
}


def swap(plan: Plan, experiment: Experiment, launcher: Launcher) -> dict[tuple[str, str], Verdict]:
    """The verdict for each way of setting the arms, from one run of each."""
    patterns = [signature.pattern for signature in plan.entry.meta.signatures if signature.role is not Role.CONTEXT]
    with ThreadPoolExecutor(JOBS) as pool:  # they mostly wait, and a verification runs as many at a time
        runs = dict(zip(ARMS, pool.map(lambda arm: launcher.run(plan.task(experiment, arm), arm), ARMS), strict=True))
    assert [leftover for run in runs.values() for leftover in run.leftovers] == []
    return {
        (first, second): judge(experiment, runs[first], runs[second], patterns).verdict for first, second in FOLLOWING
    }

"""The order in which plans run, with real arms."""

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


class Quiet:
    def begin(self, key: str, text: str) -> None: ...
    def end(self, key: str) -> None: ...


@pytest.mark.slow
def test_of_the_plans_that_wait_the_longest_begins_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        result = verify(plans, launcher, {}, RunOptions(on_report=note), Quiet())
    ids = [plan.entry.id for plan in plans]
    assert {report.verdict for report in result.reports} == {Verdict.VERIFIED}
    assert seen == [ids[0], ids[2], ids[3], ids[1]]
    assert [report.entry_id for report in result.reports] == ids

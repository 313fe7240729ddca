"""The record of one verification: what ran where, how it ended, and what that means."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kb import __version__
from kb.harness.outcome import ArmOutcome
from kb.probe import FIDELITIES, Arm, Experiment, Finding
from kb.verify.advice import with_command
from kb.verify.statistics import Counts, interval
from kb.verify.verdict import EXIT_CODES, Judgement, Verdict

NEXT_STEPS = {
    Verdict.VERIFIED: "apply the fix: `kb show {id} --section fix`",
    Verdict.EXPOSED: "fix what the check names, then verify again",
    Verdict.CLEAR: "nothing to do here now; to see whether it caused an earlier failure, run `kb diagnose LOG`",
    Verdict.NOT_REPRODUCED: "this stack does not show the incident: compare versions, `kb show {id}`, Environment",
    Verdict.FIX_INEFFECTIVE: "do not rely on this fix here; keep the logs (--keep-logs DIR) and report them",
    Verdict.OTHER_FAILURE: "find out what broke here: run it again with --keep-logs DIR",
    Verdict.INVERTED: "the entry or its probe is wrong on this stack: please report it",
    Verdict.INCONCLUSIVE: "run it again, alone, with --keep-logs DIR",
    Verdict.NOT_APPLICABLE: "run it on a machine that has what is missing",
}
NOTHING_RAN: dict[str, Any] = {"experiment": None, "stands_for": None, "arms": None, "repeats": None}
WITH_PYTHON = "--python /path/to/your/training/env/bin/python"


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """One experiment that ran, its verdict, and the last pair of arms; `counts` if several pairs ran."""

    experiment: Experiment
    judgement: Judgement
    control: ArmOutcome
    treatment: ArmOutcome
    counts: Counts | None = None

    @property
    def fidelity(self) -> str:
        """The weaker fidelity of the two arms."""
        arms = (self.experiment.control, self.experiment.treatment)
        return max((arm.fidelity for arm in arms), key=FIDELITIES.index)

    @property
    def is_refused(self) -> bool:
        """Whether the job found, once it ran, that this machine lacks what it needs."""
        return self.judgement.verdict is Verdict.NOT_APPLICABLE

    @property
    def leftovers(self) -> tuple[str, ...]:
        return (*self.control.leftovers, *self.treatment.leftovers)

    def to_json(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment.name,
            "verdict": self.judgement.verdict.value,
            "reason": self.judgement.reason,
            "evidence": self.judgement.evidence,
            "fidelity": self.fidelity,
            "stands_for": self.experiment.control.stands_for or None,
            "arms": {
                "control": _arm_json(self.experiment.control, self.control),
                "treatment": _arm_json(self.experiment.treatment, self.treatment),
            },
            "repeats": _counts_json(self.counts),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """One verification. Durations are seconds; `started_at` is UTC; digests are sha256 of entry and probe.

    `results` are the results of the experiment that ran, then of the variants; `judgement` is the verdict over all of
    them. `has_named_file`: the caller named a file, so what the check says about it comes first.
    """

    entry_id: str
    title: str
    judgement: Judgement
    entry_digest: str
    probe_digest: str
    started_at: datetime.datetime
    duration_s: float
    environment: Mapping[str, Any]
    results: tuple[ExperimentResult, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    check: Finding | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    has_named_file: bool = False

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def fidelity(self) -> str:
        """The fidelity of the experiment; `check` if none ran."""
        return self.results[0].fidelity if self.results else "check"

    @property
    def exit_code(self) -> int:
        """Never 0 if the machine is exposed, whatever the arms showed, or if a named file was not judged."""
        if self.check is None or self.check.state == "clear":
            return EXIT_CODES[self.verdict]
        if self.check.state == "exposed":
            return max(EXIT_CODES[self.verdict], 1)
        return EXIT_CODES[self.verdict] or (EXIT_CODES[Verdict.INCONCLUSIVE] if self.has_named_file else 0)

    @property
    def leftovers(self) -> tuple[str, ...]:
        return tuple(leftover for result in self.results for leftover in result.leftovers)

    @property
    def lacks_package(self) -> bool:
        """Whether another interpreter might run what this one could not."""
        reasons = [reason for _, reason in self.skipped]
        return self.verdict is Verdict.NOT_APPLICABLE and any("is not installed in" in reason for reason in reasons)

    @property
    def next_step(self) -> str:
        if self.check and self.check.advice and self.check.state != "clear":
            return with_command(self.check.advice, self.entry_id)
        if self.has_named_file and self.check and self.check.state == "unknown":
            return "name a file that the check can read: the verdict is about the mechanism, not about your file"
        if self.lacks_package:
            return f"install it there, or name your training environment: `kb verify {self.entry_id} {WITH_PYTHON}`"
        return self.judgement.next_step or NEXT_STEPS[self.verdict].format(id=self.entry_id)

    def to_json(self) -> dict[str, Any]:
        """The report for `kb verify --json`, the store and the API."""
        first, *variants = [result.to_json() for result in self.results] or [NOTHING_RAN]
        return {
            **first,
            "id": self.entry_id,
            "title": self.title,
            "verdict": self.verdict.value,
            "reason": self.judgement.reason,
            "evidence": self.judgement.evidence,
            "fidelity": self.fidelity,
            "variants": variants,
            "skipped": [{"experiment": name, "reason": reason} for name, reason in self.skipped],
            "check": _check_json(self.check),
            "params": {name: str(value) for name, value in self.params.items() if value is not None},
            "next_step": self.next_step,
            "environment": dict(self.environment),
            "entry_digest": self.entry_digest,
            "probe_digest": self.probe_digest,
            "started_at": self.started_at.isoformat(),
            "duration_s": round(self.duration_s, 3),
            "leftovers": list(self.leftovers),
            "kb_version": __version__,
        }


def overall(results: Sequence[ExperimentResult]) -> Judgement:
    """The experiment's verdict, or the verdict of a variant that contradicts it."""
    for result in results[1:]:
        if results[0].judgement.verdict is Verdict.VERIFIED is not result.judgement.verdict:
            return replace(result.judgement, reason=f"variant {result.experiment.name}: {result.judgement.reason}")
    return results[0].judgement


def _arm_json(arm: Arm, outcome: ArmOutcome) -> dict[str, Any]:
    return {
        "because": arm.because,
        "expected": arm.expect.kind,
        "pattern": arm.expect.pattern or None,
        "fidelity": arm.fidelity,
        **outcome.to_json(),
    }


def _check_json(check: Finding | None) -> dict[str, Any] | None:
    if check is None:
        return None
    return {"state": check.state, "evidence": list(check.evidence), "advice": check.advice or None}


def _counts_json(counts: Counts | None) -> dict[str, Any] | None:
    if counts is None or counts.pairs == 0:
        return None
    return {
        "pairs": counts.pairs,
        "control_failures": counts.control,
        "treatment_failures": counts.treatment,
        "control_rate_95": interval(counts.control, counts.pairs),
        "treatment_rate_95": interval(counts.treatment, counts.pairs),
        "p": round(counts.p, 6),
    }


def summary(reports: Sequence[Report]) -> dict[str, int]:
    """The number of reports with each verdict."""
    return dict(sorted(Counter(report.verdict.value for report in reports).items()))


def exit_code(reports: Sequence[Report]) -> int:
    """The exit code for several reports: a negative finding (1) first, then doubt (3), then not applicable (4).

    Not applicable counts only if there is no other code: on a machine without GPUs, `--all` succeeds if everything that
    could run was verified.
    """
    codes = [report.exit_code for report in reports]
    for code in (1, 3):
        if code in codes:
            return code
    return 0 if 0 in codes else max(codes, default=0)

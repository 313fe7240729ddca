"""`judge`: from two arms to one verdict. Pure: no process, no clock, no file.

| control            | treatment            | verdict         |
|--------------------|----------------------|-----------------|
| fails as declared  | completes            | verified        |
| fails as declared  | fails the same way   | fix-ineffective |
| fails as declared  | fails some other way | other-failure   |
| completes          | completes            | not-reproduced  |
| completes          | fails                | inverted        |
| fails some other way | anything           | other-failure   |

Before that, an arm that could not run makes it not-applicable; a harness failure, a mechanism mark that was not
reached, or a hang that no expectation declares makes it inconclusive. Without an experiment, the finding of the check
is the verdict: exposed, clear, or, if it is unknown, not-applicable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kb.harness.outcome import HUNG, UNAVAILABLE, ArmOutcome, RankOutcome
from kb.patterns.literals import find
from kb.probe import Experiment, Finding


class Verdict(StrEnum):
    VERIFIED = "verified"
    NOT_REPRODUCED = "not-reproduced"
    FIX_INEFFECTIVE = "fix-ineffective"
    OTHER_FAILURE = "other-failure"
    INVERTED = "inverted"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not-applicable"
    EXPOSED = "exposed"
    CLEAR = "clear"


LONGEST_LINE = 160  # characters
UNDECLARED = {
    "control": "find out what broke here: {}. If this is your incident, let the control arm expect it and add a"
    " signature that matches it to the entry",
    "treatment": "the fix removed the declared failure, but then something else ended the job: {}. Fix that and verify"
    " again, or correct the treatment",
}
EXIT_CODES = {
    Verdict.VERIFIED: 0,
    Verdict.CLEAR: 0,
    Verdict.EXPOSED: 1,
    Verdict.FIX_INEFFECTIVE: 1,
    Verdict.INVERTED: 1,
    Verdict.OTHER_FAILURE: 1,
    Verdict.NOT_REPRODUCED: 3,
    Verdict.INCONCLUSIVE: 3,
    Verdict.NOT_APPLICABLE: 4,
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, the sentence that explains it, the line of evidence, and a next step if it depends on the evidence."""

    verdict: Verdict
    reason: str
    evidence: str = ""
    next_step: str = ""


def judge(experiment: Experiment, control: ArmOutcome, treatment: ArmOutcome, patterns: Sequence[str]) -> Judgement:
    """Judge one run of both arms. `patterns` are the entry's root and cascade signatures."""
    for name, arm in (("control", control), ("treatment", treatment)):
        early = _cannot_judge(name, arm)
        if early:
            return early
    declared = control.failure_as(experiment.control.expect)
    if declared is not None:
        return _judge_reproduced(experiment, control, treatment, declared, patterns)
    if control.has_completed:
        if treatment.has_completed:
            return Judgement(Verdict.NOT_REPRODUCED, "the control arm did not fail on this machine")
        return Judgement(Verdict.INVERTED, "the control arm passed and the treatment failed", _first_failure(treatment))
    return _undeclared("control", control)


def judge_check(finding: Finding | None, skipped: tuple[tuple[str, str], ...], *, is_asked: bool) -> Judgement:
    """The verdict if no experiment ran. `is_asked`: the caller gave the check values or files to judge.

    A check sees the machine as it is now. If experiments could not run, `clear` would look like an answer about the
    incident, and a skip is never a pass.
    """
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    if finding is None:
        return Judgement(Verdict.NOT_APPLICABLE, reasons or "the probe has nothing to run")
    evidence = "; ".join(finding.evidence)
    if finding.state == "exposed":
        return Judgement(Verdict.EXPOSED, "the check found this machine or configuration exposed", evidence)
    if finding.state == "clear" and (is_asked or not skipped):
        return Judgement(Verdict.CLEAR, "the check found nothing", evidence)
    if finding.state == "clear":
        reason = "the check finds nothing now, which verifies neither the incident nor its fix"
        return Judgement(Verdict.NOT_APPLICABLE, reason, evidence)
    return Judgement(Verdict.NOT_APPLICABLE, "; ".join(filter(None, (evidence, reasons))))


def _judge_reproduced(
    experiment: Experiment,
    control: ArmOutcome,
    treatment: ArmOutcome,
    declared: tuple[RankOutcome, str],
    patterns: Sequence[str],
) -> Judgement:
    (rank, evidence), expect = declared, experiment.control.expect
    texts = [failed.text for failed in (control.failures if expect.after else (rank,))]
    if expect.kind == "raised" and not any(find(pattern, text) for pattern in patterns for text in texts):
        reason = "the control arm failed as declared, but not with a signature of the entry"
        step = f"if this is your incident, add a signature that matches it to the entry: {_short(evidence)}"
        return Judgement(Verdict.OTHER_FAILURE, reason, evidence, step)
    if treatment.has_completed:
        reason = "the control arm failed as the entry says, the treatment completed"
        return Judgement(Verdict.VERIFIED, reason, evidence)
    same = treatment.failure_as(expect)
    if same is not None:
        return Judgement(Verdict.FIX_INEFFECTIVE, "the treatment failed the same way as the control arm", same[1])
    return _undeclared("treatment", treatment)


def _cannot_judge(name: str, arm: ArmOutcome) -> Judgement | None:
    if arm.failure:
        return Judgement(Verdict.INCONCLUSIVE, f"the harness failed in the {name} arm: {arm.failure}")
    for rank in arm.ranks:
        if rank.kind == UNAVAILABLE:
            return Judgement(Verdict.NOT_APPLICABLE, rank.message)
    if not arm.has_reached:
        reason = f"the {name} arm ended before its mechanism was reached, {arm.attempts} times"
        return Judgement(Verdict.INCONCLUSIVE, reason, _first_failure(arm))
    return None


def _undeclared(name: str, arm: ArmOutcome) -> Judgement:
    if arm.kind == HUNG:
        return Judgement(Verdict.INCONCLUSIVE, f"the {name} arm was still running at its deadline", _first_failure(arm))
    reason = f"the {name} arm failed in a way the entry does not declare"
    line = _first_failure(arm)
    return Judgement(Verdict.OTHER_FAILURE, reason, line, UNDECLARED[name].format(_short(line)))


def _short(line: str) -> str:
    """A line, cut so that it fits into a sentence."""
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."


def _first_failure(arm: ArmOutcome) -> str:
    """The message of the first failing rank, in one line."""
    rank = arm.first_failure
    if rank is None:
        return ""
    message = rank.message or rank.signal or (rank.log.strip().splitlines() or [""])[-1]
    return f"rank {rank.rank}: {rank.type or rank.kind}: {' '.join(message.split())}"[:500]

"""`judge`, row by row."""

from __future__ import annotations

import pytest

from kb.harness.outcome import ArmOutcome, RankOutcome
from kb.probe import Arm, Context, Expect, Experiment, completed, hung, killed, raised, symptom
from kb.verify.verdict import Judgement, Verdict, judge


def job(ctx: Context) -> None:
    raise AssertionError("judging runs nothing")


def experiment(expect: Expect) -> Experiment:
    return Experiment(
        name="x",
        control=Arm(job, expect=expect, because="broken", fidelity="cpu"),
        treatment=Arm(job, expect=completed(), because="whole", fidelity="cpu"),
    )


def arm(*ranks: RankOutcome, has_reached: bool = True, failure: str = "") -> ArmOutcome:
    return ArmOutcome(ranks=ranks, has_reached=has_reached, failure=failure)


DONE = arm(RankOutcome(0, "completed"))
DECLARED = arm(
    RankOutcome(0, "stopped"), RankOutcome(1, "raised", type="RuntimeError", message="Timed out waiting 5ms")
)
ABORTED = arm(RankOutcome(0, "killed", signal="SIGABRT", log="terminate called\nTimed out waiting 5ms"))
OTHER = arm(RankOutcome(0, "raised", type="ImportError", message="no module"))
HUNG = arm(RankOutcome(0, "hung", stacks='File "x.py", line 3 in wait'))
KILLED = arm(RankOutcome(0, "killed", signal="SIGKILL"))
MEASURED = arm(RankOutcome(0, "symptom", type="Symptom", message="file is 9 times the tensor"))
EARLY = arm(RankOutcome(0, "raised", message="Timed out waiting 5ms"), has_reached=False)
BROKEN = arm(failure="its guard died")
LACKING = arm(RankOutcome(0, "unavailable", message="no mount namespace"), has_reached=False)
TIMEOUT = raised("Timed out")

TABLE = [
    (TIMEOUT, DECLARED, DONE, Verdict.VERIFIED),
    (TIMEOUT, ABORTED, DONE, Verdict.VERIFIED),
    (hung("in wait"), HUNG, DONE, Verdict.VERIFIED),
    (killed("SIGKILL"), KILLED, DONE, Verdict.VERIFIED),
    (symptom("times the tensor"), MEASURED, DONE, Verdict.VERIFIED),
    (TIMEOUT, DECLARED, DECLARED, Verdict.FIX_INEFFECTIVE),
    (hung("in wait"), HUNG, HUNG, Verdict.FIX_INEFFECTIVE),
    (TIMEOUT, DECLARED, OTHER, Verdict.OTHER_FAILURE),
    (TIMEOUT, DECLARED, HUNG, Verdict.INCONCLUSIVE),
    (TIMEOUT, DONE, DONE, Verdict.NOT_REPRODUCED),
    (TIMEOUT, DONE, DECLARED, Verdict.INVERTED),
    (TIMEOUT, DONE, OTHER, Verdict.INVERTED),
    (TIMEOUT, OTHER, DONE, Verdict.OTHER_FAILURE),
    (TIMEOUT, HUNG, DONE, Verdict.INCONCLUSIVE),
    (hung("somewhere else"), HUNG, DONE, Verdict.INCONCLUSIVE),
    (killed("SIGSEGV"), KILLED, DONE, Verdict.OTHER_FAILURE),
    (TIMEOUT, MEASURED, DONE, Verdict.OTHER_FAILURE),
    (TIMEOUT, EARLY, DONE, Verdict.INCONCLUSIVE),
    (TIMEOUT, DECLARED, EARLY, Verdict.INCONCLUSIVE),
    (TIMEOUT, DECLARED, arm(RankOutcome(0, "completed"), has_reached=False), Verdict.INCONCLUSIVE),
    (TIMEOUT, BROKEN, DONE, Verdict.INCONCLUSIVE),
    (TIMEOUT, DECLARED, BROKEN, Verdict.INCONCLUSIVE),
    (TIMEOUT, LACKING, DONE, Verdict.NOT_APPLICABLE),
    (TIMEOUT, DECLARED, LACKING, Verdict.NOT_APPLICABLE),
]


def test_a_process_whose_death_was_seen_late_may_have_failed_first() -> None:
    """Its peer noticed at once, but the guard sees an exit up to a second later on a busy machine."""
    lost = RankOutcome(1, "raised", type="Symptom", message="the sums differ", ended=8.0)
    aborted = RankOutcome(0, "killed", signal="SIGABRT", log="Timed out waiting 5ms", ended=8.4)
    later = RankOutcome(0, "killed", signal="SIGABRT", log="Timed out waiting 5ms", ended=9.4)
    assert decide(TIMEOUT, arm(aborted, lost), DONE).verdict is Verdict.VERIFIED
    assert decide(TIMEOUT, arm(later, lost), DONE).verdict is Verdict.OTHER_FAILURE


def test_an_abort_is_judged_by_its_last_words() -> None:
    log = "Timed out waiting 5ms, trying again\nterminate called after throwing an instance of 'x'\n  what():  out of range"
    aborted = RankOutcome(0, "killed", signal="SIGABRT", log=log)
    assert decide(TIMEOUT, arm(aborted), DONE).verdict is Verdict.OTHER_FAILURE
    assert decide(raised("out of range"), arm(aborted), DONE).verdict is Verdict.VERIFIED


def decide(expect: Expect, control: ArmOutcome, treatment: ArmOutcome, *patterns: str) -> Judgement:
    return judge(experiment(expect), control, treatment, patterns or ("Timed out",))


@pytest.mark.parametrize("expect, control, treatment, verdict", TABLE)
def test_each_pair_of_outcomes_has_its_verdict(
    expect: Expect, control: ArmOutcome, treatment: ArmOutcome, verdict: Verdict
) -> None:
    assert decide(expect, control, treatment).verdict is verdict


def test_a_failure_that_is_not_a_signature_of_the_entry_verifies_nothing() -> None:
    assert decide(TIMEOUT, DECLARED, DONE, "another text").verdict is Verdict.OTHER_FAILURE


def test_the_evidence_is_the_line_that_matched() -> None:
    assert decide(TIMEOUT, DECLARED, DONE).evidence == "RuntimeError: Timed out waiting 5ms"
    assert decide(TIMEOUT, ABORTED, DONE).evidence == "Timed out waiting 5ms"


def test_a_rank_that_died_after_its_result_has_not_completed() -> None:
    from kb.harness.outcome import rank_outcome

    assert rank_outcome(0, {"outcome": "completed"}, -11, "all exited", "", "", "").kind == "killed"
    assert rank_outcome(0, {"outcome": "completed"}, 0, "all exited", "", "", "").kind == "completed"
    assert rank_outcome(0, None, 0, "all exited", "", "", "").kind == "exited"
    assert rank_outcome(0, None, None, "deadline", "", "", "").kind == "hung"
    assert rank_outcome(0, None, None, "settled", "", "", "").kind == "stopped"
    assert rank_outcome(0, {"outcome": "fine"}, 3, "all exited", "", "", "").kind == "exited"

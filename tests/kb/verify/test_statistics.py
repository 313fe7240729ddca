"""Repeated runs: counts, intervals, and when a split is no chance."""

from __future__ import annotations

import pytest

from kb.verify.statistics import Counts, interval, judge_repeats, majority
from kb.verify.verdict import Judgement, Verdict

VERIFIED, INEFFECTIVE, NOT, INVERTED, UNCLEAR, OTHER = (
    Judgement(verdict, verdict.value)
    for verdict in (
        Verdict.VERIFIED,
        Verdict.FIX_INEFFECTIVE,
        Verdict.NOT_REPRODUCED,
        Verdict.INVERTED,
        Verdict.INCONCLUSIVE,
        Verdict.OTHER_FAILURE,
    )
)


def test_four_of_four_against_none_has_a_chance_of_1_in_70() -> None:
    assert Counts(4, 4, 0).p == pytest.approx(1 / 70)
    assert Counts(3, 3, 0).p == pytest.approx(1 / 20)
    assert Counts(4, 0, 0).p == 1.0


def test_intervals_are_clopper_pearson() -> None:
    assert interval(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert interval(10, 10) == pytest.approx((0.6915, 1.0), abs=1e-4)
    assert interval(5, 10) == pytest.approx((0.1871, 0.8129), abs=1e-4)


@pytest.mark.parametrize(
    "judgements, verdict",
    [
        ([VERIFIED] * 4, Verdict.VERIFIED),
        ([VERIFIED] * 6 + [NOT] * 2, Verdict.VERIFIED),
        ([VERIFIED, NOT, NOT, NOT], Verdict.INCONCLUSIVE),
        ([VERIFIED] * 5 + [INEFFECTIVE], Verdict.FIX_INEFFECTIVE),
        ([NOT] * 4, Verdict.NOT_REPRODUCED),
        ([NOT, NOT, INVERTED], Verdict.INVERTED),
        ([VERIFIED, VERIFIED, VERIFIED, OTHER], Verdict.OTHER_FAILURE),
        ([UNCLEAR, UNCLEAR], Verdict.INCONCLUSIVE),
        ([VERIFIED] * 4 + [UNCLEAR], Verdict.VERIFIED),
    ],
)
def test_counts_give_a_verdict(judgements: list[Judgement], verdict: Verdict) -> None:
    assert judge_repeats(judgements)[0].verdict is verdict


def test_a_majority_needs_two_that_agree() -> None:
    assert majority([VERIFIED]) is None
    assert majority([NOT, VERIFIED]) is None
    result = majority([NOT, VERIFIED, VERIFIED])
    assert result is not None
    assert result.verdict is Verdict.VERIFIED

"""Judges repeated runs: what they agree on, failure rates with intervals, and whether chance explains the split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

from kb.probe import Experiment
from kb.verify.verdict import Judgement, Verdict

ENOUGH = 4  # pairs after which a clear split of a stochastic experiment is decided (p = 1/70)
MOST_PAIRS = 10
SIGNIFICANT = 0.05  # one-sided p below which the arms differ; 4 of 4 against 0 of 4 gives 1/70


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of declared failures in each arm over `pairs` judged pairs."""

    pairs: int
    control: int
    treatment: int

    @property
    def p(self) -> float:
        """Fisher's exact test, one-sided: the chance of a split at least this clear if the fix did nothing."""
        failures = self.control + self.treatment
        most = min(failures, self.pairs)
        ways = sum(comb(self.pairs, k) * comb(self.pairs, failures - k) for k in range(self.control, most + 1))
        return ways / comb(2 * self.pairs, failures)


def interval(failures: int, runs: int, level: float = 0.95) -> tuple[float, float]:
    """The Clopper-Pearson interval of a failure rate (Clopper and Pearson 1934), by bisection on the binomial."""
    tail = (1 - level) / 2
    low = 0.0 if failures == 0 else _solve(lambda rate: 1 - _at_most(failures - 1, runs, rate) < tail)
    high = 1.0 if failures == runs else _solve(lambda rate: _at_most(failures, runs, rate) > tail)
    return low, high


def judge_repeats(judgements: Sequence[Judgement]) -> tuple[Judgement, Counts]:
    """One judgement over several pairs. The counts exclude inconclusive pairs."""
    verdicts = [judgement.verdict for judgement in judgements]
    judged = [v for v in verdicts if v not in (Verdict.INCONCLUSIVE, Verdict.NOT_APPLICABLE)]
    failing = (Verdict.VERIFIED, Verdict.FIX_INEFFECTIVE)
    counts = Counts(
        pairs=len(judged),
        control=sum(v in failing for v in judged),
        treatment=sum(v in (Verdict.FIX_INEFFECTIVE, Verdict.INVERTED) for v in judged),
    )
    if not judged or len(set(verdicts)) == 1 or Verdict.OTHER_FAILURE in judged:
        worst = next(
            (judgement for judgement in judgements if judgement.verdict is Verdict.OTHER_FAILURE), judgements[0]
        )
        return worst, counts
    summary = f"control failed {counts.control} of {counts.pairs}, treatment {counts.treatment} of {counts.pairs}"
    evidence = next((judgement.evidence for judgement in judgements if judgement.evidence), "")
    if counts.treatment:
        verdict = Verdict.FIX_INEFFECTIVE if counts.control else Verdict.INVERTED
    elif counts.control == 0:
        verdict = Verdict.NOT_REPRODUCED
    else:
        verdict = Verdict.VERIFIED if counts.p < SIGNIFICANT else Verdict.INCONCLUSIVE
    return Judgement(verdict, f"{summary} (one-sided p {counts.p:.3f})", evidence), counts


def is_decided(judgements: Sequence[Judgement], experiment: Experiment, repeat: int) -> bool:
    """Whether no other pair of arms is needed.

    With `repeat`, after that many pairs. For a deterministic experiment, if it is verified, if two runs agree, or after
    three. For a stochastic one, if `ENOUGH` pairs split clearly, or after `MOST_PAIRS`.
    """
    pairs = len(judgements)
    if judgements[-1].verdict is Verdict.NOT_APPLICABLE:
        return True
    if repeat:
        return pairs >= repeat
    if not experiment.stochastic:
        return judgements[0].verdict is Verdict.VERIFIED or majority(judgements) is not None or pairs >= 3
    all_verified = all(judgement.verdict is Verdict.VERIFIED for judgement in judgements)
    return pairs >= MOST_PAIRS or (pairs >= ENOUGH and all_verified)


def majority(judgements: Sequence[Judgement]) -> Judgement | None:
    """The judgement that two runs agree on, or None."""
    for number, judgement in enumerate(judgements):
        if any(judgement.verdict is other.verdict for other in judgements[:number]):
            return judgement
    return None


def _at_most(k: int, n: int, rate: float) -> float:
    return sum(comb(n, i) * rate**i * (1 - rate) ** (n - i) for i in range(k + 1))


def _solve(is_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return round((low + high) / 2, 4)

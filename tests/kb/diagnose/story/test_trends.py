"""Metrics that end in nan, at zero or stand still, that jump or fall; and those of healthy jobs, which say nothing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kb.diagnose.story.attempts import read_attempts
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.fact import Fact
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.timeline import Attempt
from kb.diagnose.story.trends import summarize_metrics, trends

FALLING = [f"{2.5 - step / 20:.4f}" for step in range(30)]


def attempt(lines: Iterable[str]) -> Attempt:
    data = "".join(f"{line}\n" for line in lines).encode()
    (only,) = read_attempts(read_lines([Excerpt("job.log", None, None, (Part(1, data),))]))
    return only


def reports(values: Iterable[str], rank: int | None = None, words: str = "step {} loss {}") -> list[str]:
    prefix = "" if rank is None else f"[rank{rank}]: "
    return [f"{prefix}{words.format(step, value)}" for step, value in enumerate(values, 1)]


def facts(*series: list[str]) -> list[Fact]:
    return list(trends(attempt(line for lines in series for line in lines)))


def texts(*series: list[str]) -> list[str]:
    return [fact.text for fact in facts(*series)]


@pytest.mark.parametrize("value", ["nan", "NaN", "-nan"])
def test_nan_from_a_step_to_the_end(value: str) -> None:
    (fact,) = facts(reports([*FALLING[:10], *[value] * 5]))
    assert (fact.kind, fact.is_context) == ("not-finite", False)
    assert fact.text == "kb: loss is nan from step 11 to the end, last finite value 2.05"
    assert [line.number for line in fact.lines] == [11]


def test_inf_of_a_norm() -> None:
    lines = reports([*["0.5"] * 10, *["inf"] * 5], words="step {} loss 1.25 grad_norm {}")
    assert "kb: grad_norm is inf from step 11 to the end, last finite value 0.5" in texts(lines)


def test_nan_from_the_first_report_on() -> None:
    assert texts(reports(["nan"] * 5)) == ["kb: loss is nan from step 1 to the end, from the first report on"]


def test_nan_that_recovers_is_context() -> None:
    (fact,) = facts(reports([*FALLING[:10], "nan", "nan", *FALLING[10:20]]))
    assert (fact.kind, fact.is_context) == ("recovered", True)
    assert fact.text == "kb: loss is nan in 2 of 22 reports, finite again later"


def test_nan_of_a_learning_rate_or_a_loss_scale_says_nothing() -> None:
    assert not facts(reports(["nan"] * 9, words="step {} lr {}"))
    assert not facts(reports(["inf"] * 9, words="step {} loss_scale {}"))


def test_zero_to_the_end() -> None:
    (fact,) = facts(reports([*FALLING[:8], *["0.0"] * 6]))
    assert (fact.kind, fact.text) == ("zero", "kb: loss is exactly 0 from step 9 to the end")


def test_a_zero_in_between_and_two_at_the_end_say_nothing() -> None:
    assert not facts(reports([*FALLING[:8], "0.0", *FALLING[8:12], "0.0", "0.0"]))


def test_the_loss_of_a_policy_may_be_zero() -> None:
    assert not facts(reports([*FALLING[:8], *["0.0"] * 6], words="step {} loss {} kl 0.1 reward 1.5"))


def test_a_loss_that_stands_still() -> None:
    (fact,) = facts(reports([*FALLING[:5], *["1.0986"] * 12]))
    assert (fact.kind, fact.text) == ("constant", "kb: loss is 1.0986 in the last 12 reports")


@pytest.mark.parametrize("value", ["1.1", "1.10", "2", "0.31"])
def test_with_fewer_than_three_decimals_equal_reports_say_nothing(value: str) -> None:
    assert not facts(reports([*FALLING[:5], *[value] * 12]))


def test_nine_equal_reports_say_nothing() -> None:
    assert not facts(reports([*FALLING[:5], *["1.0986"] * 9]))


def test_a_jump_is_context() -> None:
    (fact,) = facts(reports([*["1.3"] * 14, "99.4", "1.3"]))
    assert (fact.kind, fact.is_context) == ("jump", True)
    assert fact.text == "kb: loss jumps to 99.4 at step 15, 76 times the median before"


@pytest.mark.parametrize(
    "values",
    [
        [*["1.3"] * 14, "3.5"],  # not five times
        [*["0.001"] * 14, "0.4"],  # small still
        [*["1.3"] * 5, "50.0", *["1.3"] * 9, "99.4"],  # not three times the highest
        ["1.3", "1.3", "1.3", "99.4"],  # too early to tell
    ],
)
def test_what_is_no_jump(values: list[str]) -> None:
    last = f"at step {len(values)}"
    assert not [text for text in texts(reports(values)) if "jumps" in text and last in text]


@pytest.mark.parametrize(
    "name",
    [
        "tokens/s",
        "samples/s",
        "throughput",
        "it/s",
        "tokens_per_sec",
    ],
)
def test_a_throughput_that_falls_and_stays(name: str) -> None:
    (fact,) = facts(reports([*["1000"] * 30, *["400"] * 10], words="step {} " + name + " {}"))
    assert (fact.kind, fact.is_context) == ("slower", True)
    assert "falls to 40% at step 31 and stays there" in fact.text


def test_a_throughput_that_comes_back_or_falls_little_says_nothing() -> None:
    words = "step {} tokens/s {}"
    assert not facts(reports([*["1000"] * 30, *["400"] * 9, "990"], words=words))
    assert not facts(reports([*["1000"] * 30, *["700"] * 10], words=words))
    assert not facts(reports([*["1000"] * 12, *["400"] * 4], words=words))


def test_a_healthy_job_says_nothing() -> None:
    assert not facts(*(reports(FALLING, rank) for rank in range(4)))


def test_only_the_odd_rank_is_accused() -> None:
    bad = [*FALLING[:10], *["nan"] * 5]
    (fact,) = facts(*(reports(bad if rank == 2 else FALLING, rank) for rank in range(4)))
    assert fact.ranks == (2,)
    assert fact.text.startswith("kb: rank 2: loss is nan from step 11")


def test_where_all_ranks_have_it_none_is_accused() -> None:
    (fact,) = facts(*(reports([*FALLING[:10], *["nan"] * 5], rank) for rank in range(4)))
    assert fact.ranks == ()
    assert fact.text.startswith("kb: ranks 0-3: loss is nan from step 11")


def test_an_epoch_stands_in_for_a_step() -> None:
    lines = [f"{{'loss': {'nan' if at > 4 else 1.5}, 'epoch': {at / 10:.1f}}}" for at in range(1, 9)]
    assert texts(lines) == ["kb: loss is nan from epoch 0.5 to the end, last finite value 1.5"]


def test_series_are_summarised_for_each_rank() -> None:
    job = attempt([*reports(["2.5", "1.5", "nan"], 0), *reports(["2.0"], 1), *reports(["nan"], 2)])
    found = [(one.rank, one.count, one.first, one.last, one.lowest, one.highest, one.not_finite, one.not_finite_at) for one in summarize_metrics(job)]  # fmt: skip
    assert found == [
        (0, 3, 2.5, 1.5, 1.5, 2.5, 1, "step 3"),
        (1, 1, 2.0, 2.0, 2.0, 2.0, 0, ""),
        (2, 1, None, None, None, None, 1, "step 1"),
    ]

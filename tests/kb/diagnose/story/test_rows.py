"""Rows of a picture: spans of phases on an axis of time or of lines, marks, and bounds on both."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.story.attempts import read_attempts
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.rows import MOST_ROWS, MOST_SPANS, summarize
from kb.diagnose.story.summary import AttemptSummary, RankRow

GAVE_UP = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"


def summary(lines: Sequence[str]) -> AttemptSummary:
    data = "".join(f"{line}\n" for line in lines).encode()
    (attempt,) = read_attempts(read_lines([Excerpt("job.log", None, None, (Part(1, data),))]))
    return summarize(attempt)


def row(lines: Sequence[str]) -> RankRow:
    (only,) = summary(lines).rows
    return only


def raises(rank: int, error: str) -> list[str]:
    lines = ["Traceback (most recent call last):", '  File "/work/t.py", line 44, in save', "    f()", error]
    return [f"[rank{rank}]: {line}" for line in lines]


def steps(rank: int, last: int) -> list[str]:
    return [f"[rank{rank}]: step {step} loss 1.25" for step in range(1, last + 1)]


def test_phases_are_spans_with_their_last_counter() -> None:
    found = row(["[rank0]: loading model", *steps(0, 8), *(f"[rank0]: validation batch {at}/9" for at in range(1, 9))])
    assert [(span.phase, span.last) for span in found.spans] == [
        ("load", "load"),
        ("train", "train step 8"),
        ("evaluate", "evaluate batch 8/9"),
    ]
    assert found.ending == "evaluate batch 8/9"
    assert found.mark == ""


def test_a_line_that_names_no_phase_continues_the_last_one() -> None:
    found = row(["[rank0]: saving checkpoint", *(f"[rank0]: [{at}/29] files" for at in range(1, 29))])
    assert [span.phase for span in found.spans] == ["save"]


def test_silence_is_a_gap() -> None:
    clock = "2026-11-22 01:{:02}:00,000 - INFO - rank 0 step {} loss 1.25"
    spans = row([clock.format(minute, minute) for minute in (*range(10), *range(40, 50))]).spans
    assert [span.phase for span in spans] == ["train", "train"]
    assert spans[0].end < 0.25 < 0.75 < spans[1].start


def test_with_a_clock_the_axis_is_time() -> None:
    clock = "2026-11-22 01:00:{:02},000 - INFO - rank 0 step {} loss 1.25"
    found = summary([clock.format(second, second) for second in range(0, 50, 7)])
    assert found.seconds == 49
    assert found.lines == 8


def test_without_a_clock_the_axis_is_the_order_of_lines() -> None:
    found = summary([*steps(0, 20), *steps(1, 20)])
    assert found.seconds is None
    assert [span.start for one in found.rows for span in one.spans] == [0.0, pytest.approx(20 / 39, abs=1e-3)]


def test_one_line_without_a_clock_makes_it_the_order() -> None:
    clock = "2026-11-22 01:00:{:02},000 - INFO - rank 0 step {} loss 1.25"
    assert summary([*(clock.format(second, second) for second in range(9)), "step 10 loss 1.25"]).seconds is None


@pytest.mark.parametrize(
    ("lines", "mark", "place"),
    [
        (raises(0, GAVE_UP), "T", "t.py:44 save"),
        (raises(0, "KeyError: 'x'"), "X", "t.py:44 save"),
        (["rank      : 0 (local_rank: 0)", "exitcode  : -9 (pid: 7)"], "K", ""),
        (["rank      : 0 (local_rank: 0)", "exitcode  : 3 (pid: 7)"], "X", ""),
        (["rank      : 0 (local_rank: 0)", "exitcode  : -15 (pid: 7)"], "", ""),
    ],
)
def test_marks(lines: list[str], mark: str, place: str) -> None:
    found = row([*steps(0, 4), *lines])
    assert (found.mark, found.place) == (mark, place)


def test_the_exit_code_is_the_ending() -> None:
    assert row([*steps(0, 4), "rank      : 0 (local_rank: 0)", "exitcode  : -15 (pid: 7)"]).ending == "SIGTERM"


def test_lines_without_a_rank_come_last_and_only_with_something_to_show() -> None:
    assert [one.rank for one in summary(["step 1", *steps(7, 4), *steps(2, 4)]).rows] == [2, 7, None]
    assert [one.rank for one in summary(["hello", *steps(7, 4)]).rows] == [7]


def test_rows_and_spans_are_bounded() -> None:
    words = ("validation batch {}", "saving file {}", "step {}", "loading shard {}")
    lines = [f"[rank{at % 200}]: {words[at // 200 % 4].format(at)}" for at in range(60 * 200)]
    found = summary(lines)
    assert [one.rank for one in found.rows] == list(range(MOST_ROWS))
    assert all(len(one.spans) <= MOST_SPANS for one in found.rows)


@given(st.lists(st.sampled_from([*steps(0, 3), *raises(1, GAVE_UP), "2026-11-22 01:00:07,000 - INFO - step 2", "2026-11-22 01:00:01,000 - INFO - step 3", "[9999.5] oom", "[rank1]: saving"]), max_size=40))  # fmt: skip
def test_fractions_are_between_0_and_1_and_spans_in_order(lines: list[str]) -> None:
    for one in summary(lines).rows:
        assert 0 <= one.marked_at <= 1
        assert all(0 <= span.start <= 1 and 0 <= span.end <= 1 for span in one.spans)

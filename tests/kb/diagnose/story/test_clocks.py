"""Logs of nodes whose clocks differ: the skew is found by the steps that ranks pass together, and taken off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kb.diagnose.story.clocks import on_one_clock, skew_facts, skews
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import StoryLine, read_lines
from kb.diagnose.story.story import read_story

START = 1_780_000_000


def log(name: str, rank: int, ahead: float, steps: range = range(1, 9), pace: float = 2.0) -> Excerpt:
    rows = (
        f'{{"ts": {START + ahead + pace * step:.3f}, "rank": {rank}, "step": {step}, "loss": 2.0}}\n' for step in steps
    )
    return Excerpt(name, rank, None, (Part(1, "".join(rows).encode()),))


def lines(*logs: Excerpt) -> list[StoryLine]:
    return list(read_lines(logs))


@pytest.mark.parametrize("ahead", [37.5, -3600.0])
def test_a_clock_that_is_wrong(ahead: float) -> None:
    read = lines(log("a.log", 0, 0), log("b.log", 1, ahead))
    assert skews(read) == {"b.log": pytest.approx(ahead, abs=0.01)}
    times = [line.time for line in on_one_clock(read, skews(read))]
    assert times[:8] == pytest.approx(times[8:])


def differing() -> Iterator[tuple[str, list[Excerpt]]]:
    yield "a second is no skew", [log("a.log", 0, 0), log("b.log", 1, 1.0)]
    yield "the same rank ran twice", [log("a.log", 0, 0), log("b.log", 0, 3600)]
    yield "ranks that drift apart", [log("a.log", 0, 0), log("b.log", 1, 60, pace=9.0)]
    yield "too few steps in common", [log("a.log", 0, 0), log("b.log", 1, 60, range(7, 20))]
    yield "one log", [log("a.log", 0, 0)]
    yield "none", []


@pytest.mark.parametrize("logs", [logs for _, logs in differing()], ids=[name for name, _ in differing()])
def test_what_is_no_skew(logs: list[Excerpt]) -> None:
    read = lines(*logs)
    assert skews(read) == {}
    assert on_one_clock(read, {}) is read


def test_the_sentence_names_the_log_and_the_seconds() -> None:
    read = lines(log("a.log", 0, 0), log("b.log", 1, -42))
    (fact,) = skew_facts(read, skews(read))
    assert fact.text == "kb: the clock of b.log is 42 s behind, by its steps; times are compared without the difference"
    assert fact.is_context


def test_the_story_of_a_job_that_failed_says_so() -> None:
    raised = 'Traceback (most recent call last):\n  File "/w/t.py", line 3, in fit\n    f()\nKeyError: 1\n'
    failed = Excerpt("a.log", 0, None, (Part(1, log("a.log", 0, 0).parts[0].data + raised.encode()),))
    story = read_story([failed, log("b.log", 1, 3600)])
    assert [fact.kind for fact in story.facts] == ["own-failure", "skew"]

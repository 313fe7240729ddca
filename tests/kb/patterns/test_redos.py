"""Patterns open to ReDoS, by their structure and by timing."""

from __future__ import annotations

import pytest

from kb.patterns import redos_timing
from kb.patterns.redos import backtracking_risk

FAST = [
    r"WorkNCCL\(SeqNum=\d+, OpType=(\w+).*Timeout\(ms\)=(\d+)",
    r"Saving (FSDP model|model checkpoint|checkpoint)|Retrieving (full model|optimizer) state dict",
    r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\) of binary",
    r"store->get\(.{1,40}\) got error: (Socket Timeout|wait timeout after \d+ ?ms)|socket .* after \d+ ?ms",
    r"\(num_proc=\d+\):\s+\d+%\|",
    r"(?:\w+\.)+Error: .*",
    r"(?:[^\"\\]|\\.)*\"",
    r"(?:foo|bar){1,3}baz",
    r"(\d+,)*\d+ of \d+",
    r"(a|b)*c",
    r"broke.*twice.*",
    r"^\s*\[rank\d+\]:\s*\[E",
    r"(?:.*\n){2}end",
]

SLOW = [
    r"(a+)+$",
    r"(a*)*$",
    r"(a|aa)+$",
    r"(a|ab|b)*c",
    r"(\w+\s?)+!",
    r"(\w+\.\w*)+!",
    r"(.*a){20}",
    r"(x+x+)+y",
    r"((a?|b?)c)*!",
    r".*.*.*x",
    r".*a.*b.*c",
    r"(\s*,?\s*)+x",
    r"(?i)(a|A[bB]?|b)*!",
    r"x(?=(a+)+$)",
]

SLOW_WHEN_TIMED = [r"(?:a?){30}a{30}", r"(\d{1,40}){1,40}x"]


@pytest.mark.parametrize("pattern", FAST, ids=repr)
def test_ordinary_patterns_carry_no_risk(pattern: str) -> None:
    assert backtracking_risk(pattern) == ""


@pytest.mark.parametrize("pattern", SLOW, ids=repr)
def test_risky_patterns_are_reported(pattern: str) -> None:
    assert "unbounded repeat" in backtracking_risk(pattern)


@pytest.mark.parametrize(
    "pattern",
    [f"(?:{'|'.join(f'{number}x' for number in range(3000))})+ broke", "(?:" * 40 + r"\b" + "){3}" * 40 + "(?:ab)+"],
    ids=["alternatives", "nested"],
)
def test_patterns_that_would_take_minutes_to_check_are_reported_at_once(pattern: str) -> None:
    assert "too large to be checked" in backtracking_risk(pattern)


def test_repeats_in_repeats_make_no_text_of_gigabytes() -> None:
    assert max(map(len, redos_timing.pumped("(?:" * 8 + "a" + "){50}" * 8 + " broke", "a broke"))) < 1_000_000


def test_patterns_without_risk_are_fast() -> None:
    assert redos_timing.slow({pattern: redos_timing.pumped(pattern, "Error: 7") for pattern in FAST}) == frozenset()


def test_timing_finds_slow_patterns_that_the_structure_hides_and_continues() -> None:
    patterns = [FAST[0], SLOW_WHEN_TIMED[0], FAST[1], SLOW_WHEN_TIMED[1], FAST[2]]
    assert [backtracking_risk(pattern) for pattern in SLOW_WHEN_TIMED] == ["", ""]
    texts = {pattern: redos_timing.pumped(pattern, "a sample") for pattern in patterns}
    assert redos_timing.slow(texts, limit_s=0.2) == set(SLOW_WHEN_TIMED)


def test_timing_stops_patterns_that_would_not_end() -> None:
    texts = {pattern: redos_timing.pumped(pattern, "a sample") for pattern in (r"(a+)+$", r"(x+x+)+y", FAST[0])}
    assert redos_timing.slow(texts, limit_s=0.2) == {r"(a+)+$", r"(x+x+)+y"}


def test_pumped_texts_stay_small() -> None:
    for pattern in (*FAST, *SLOW, r"(a{1000}){1000}", "".join(f"(a{n}+b)*" for n in range(200))):
        assert sum(map(len, redos_timing.pumped(pattern, "s" * 400))) < 2_000_000
